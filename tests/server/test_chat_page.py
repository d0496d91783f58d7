"""The chat page in a headless browser, over a scripted model; and what the pages' files may do."""

import re
import shutil
import threading
import time

import pytest

ORIGINS = re.compile(r"https?://|//[a-z]", re.I)


def test_pages_come_without_a_key_and_ask_no_other_host(scripted):
    from conftest import client_of

    from generate.server.guard import Policy, digest

    client = client_of(scripted.llm, "scripted", Policy([digest("secret")]))
    seen = set()
    for path in ("/", "/status"):
        page = client.get(path, headers={"accept": "text/html,*/*"})
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert "<script>" not in page.text
        assert "onclick" not in page.text
        assert "style=" not in page.text
        seen |= set(re.findall(r'(?:src|href)="(/static/[^"]+)"', page.text))
    assert len(seen) >= 3
    while todo := [path for path in seen if path.endswith(".js")]:
        seen -= set(todo)
        for path in todo:
            script = client.get(path)
            assert script.status_code == 200, path
            assert "innerHTML" not in script.text
            assert "eval(" not in script.text
            assert not ORIGINS.search(script.text.replace("https?:", "").replace("// ", "")), path
    assert client.get("/v1/models").status_code == 401
    assert client.get("/static/../app.py").status_code == 401  # no file of the package


@pytest.fixture
def page(scripted, tmp_path):
    """A browser at the chat page, and the scripted model behind it."""
    uvicorn = pytest.importorskip("uvicorn")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no Chromium here")
    server = uvicorn.Server(uvicorn.Config(scripted.app, port=0, log_config=None, ws="none", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/browser"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options)
    driver.get(f"http://127.0.0.1:{port}/")
    yield driver, scripted.llm
    driver.quit()
    server.should_exit = True
    thread.join(10)


def until(condition, seconds=20):
    """The first true value of condition(); fails after so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("nothing came of it")


def shown(driver, who="assistant"):
    """The texts of the messages of one side."""
    return driver.execute_script(
        "return [...document.querySelectorAll(`article.${arguments[0]} .body`)].map((e) => e.innerText)", who
    )


def send(driver, text):
    box = driver.find_element("id", "input")
    box.send_keys(text, "\n")


@pytest.mark.slow
def test_a_conversation_in_a_browser(page):
    driver, model = page
    model.text, model.pause = "One **two**\n\n```py\nprint('<b>')\n```\n\n<img src=x onerror=alert(1)> & so on", 0.05
    until(lambda: driver.find_element("id", "model").text == "scripted")
    send(driver, "first question <b>bold</b>")
    lengths = set()
    until(lambda: lengths.add(len("".join(shown(driver)))) or len(lengths) > 4)  # text grows
    until(lambda: not driver.find_element("id", "stop").is_displayed())
    [body] = driver.find_elements("css selector", "article.assistant .body")
    assert body.find_element("tag name", "strong").text == "two"
    assert body.find_element("css selector", "pre code").text == "print('<b>')"
    assert not body.find_elements("tag name", "img")
    assert "<img src=x onerror=alert(1)>" in body.text
    assert shown(driver, "user") == ["first question <b>bold</b>"]
    assert "tokens/s" in driver.find_element("id", "figures").text
    assert "/ 4096" in driver.find_element("id", "context-text").text

    model.text, model.pause = "Second reply", 0.0
    send(driver, "second question")
    until(lambda: shown(driver)[-1:] == ["Second reply"])
    assert "first question" in model.prompts[-1]
    assert "One **two**" in model.prompts[-1]

    model.text, model.pause = "x" * 400, 0.05
    send(driver, "a long one")
    until(lambda: len(shown(driver)) == 3 and shown(driver)[-1])
    driver.find_element("id", "stop").click()
    until(lambda: not driver.find_element("id", "stop").is_displayed())
    until(lambda: model.running == 0)
    assert 0 < len(shown(driver)[-1]) < 400  # what came is kept

    model.text, model.pause = "Again", 0.0
    driver.find_elements("css selector", "button[data-action=regenerate]")[-1].click()
    until(lambda: shown(driver)[-1] == "Again")
    driver.find_elements("css selector", "button[data-action=edit]")[1].click()
    box = driver.find_element("css selector", "article textarea")
    box.clear()
    box.send_keys("edited\n")
    until(lambda: shown(driver, "user") == ["first question <b>bold</b>", "edited"])
    until(lambda: len(shown(driver)) == 2 and shown(driver)[-1] == "Again")

    driver.refresh()  # the conversation is still there
    until(lambda: shown(driver, "user") == ["first question <b>bold</b>", "edited"])
    driver.find_element("id", "new").click()
    assert shown(driver) == []
    assert len(driver.find_elements("css selector", "#list li")) == 1
    assert driver.get_log("browser") == []


@pytest.mark.slow
def test_settings_reach_the_server_and_reasoning_is_folded(page):
    driver, model = page
    model.text = "<think>\nbecause\n</think>\n\nso"
    driver.find_element("id", "open-settings").click()
    for name, value in {"system": "Be brief.", "temperature": "0.5", "max_tokens": "9"}.items():
        driver.find_element("id", name).send_keys(value)
    driver.find_element("css selector", "#settings button").click()
    send(driver, "why?")
    until(lambda: shown(driver) and "so" in shown(driver)[-1])
    assert model.options[-1]["temperature"] == 0.5
    assert model.options[-1]["max_tokens"] == 9
    assert "Be brief." in model.prompts[-1]
    fold = until(lambda: driver.find_elements("css selector", "details"))[0]
    assert fold.get_attribute("open") is None
    driver.get(driver.current_url + "status")
    until(lambda: driver.find_elements("id", "plot"))


@pytest.mark.slow
def test_the_page_fits_a_phone(page):
    driver, _ = page
    driver.set_window_size(390, 800)
    until(lambda: driver.find_element("id", "open-side").is_displayed())
    assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    driver.find_element("id", "open-side").click()
    until(lambda: driver.find_element("id", "new").is_displayed())
