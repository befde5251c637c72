"""The chat page in headless Chromium. Runs where chromium and selenium are installed; SCREENSHOTS=DIR keeps pictures."""

import json
import os
import shutil

import pytest

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from conftest import GOLDEN, WEATHER

DRIVER = shutil.which("chromedriver")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(not (DRIVER and BROWSER), reason="needs chromium and chromedriver")


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=900,800"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser, server):
    browser.get(server.url + "/")
    wait(browser, lambda: element(browser, "model").text == "calla-tiny")
    set_value(browser, "temperature", "0")
    yield browser
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def wait(browser, condition, seconds=60):
    return WebDriverWait(browser, seconds, 0.1).until(lambda _: condition())


def element(browser, name):
    return browser.find_element(By.ID, name)


def set_value(browser, name, value):
    browser.execute_script("document.getElementById(arguments[0]).value = arguments[1]", name, value)


def say(browser, text):
    element(browser, "input").send_keys(text)
    element(browser, "send").click()


def answered(browser):
    wait(browser, lambda: element(browser, "send").is_displayed())


def last(browser, selector):
    return browser.find_elements(By.CSS_SELECTOR, selector)[-1]


def picture(browser, name):
    if os.environ.get("SCREENSHOTS"):
        browser.save_screenshot(os.path.join(os.environ["SCREENSHOTS"], name + ".png"))


def test_chat_with_thinking(page):
    say(page, "What is a lighthouse?")
    answered(page)
    reasoning, _, content = GOLDEN[1]["output_text"].removesuffix("<|im_end|>").rpartition("\n</think>\n\n")
    assert last(page, ".assistant .text").text == content
    think = last(page, ".think")
    assert think.get_attribute("open") is None  # folded
    think.find_element(By.TAG_NAME, "summary").click()
    assert think.find_element(By.TAG_NAME, "div").text == reasoning
    assert "wrote 47" in last(page, ".stats").text
    picture(page, "thinking")
    say(page, "And what is a violin?")
    answered(page)
    assert "violin" in last(page, ".assistant .text").text
    picture(page, "second-turn")


def test_tool_call(page):
    set_value(page, "tools", json.dumps([WEATHER]))
    say(page, "What is the weather in Oslo?")
    answered(page)
    call = last(page, ".call")
    assert "get_weather" in call.text and "Oslo" in call.text
    assert element(page, "input").get_attribute("placeholder") == "Result of get_weather"
    say(page, '{"temperature": -3, "condition": "snowy"}')
    answered(page)
    assert "snowy" in last(page, ".assistant .text").text
    picture(page, "tool-call")


def test_stop_and_new_chat(page, server):
    element(page, "thinking").click()
    say(page, "Name four fruits. Repeat: " + "apple pear plum " * 30)
    wait(page, lambda: element(page, "stop").is_displayed())
    element(page, "stop").click()
    answered(page)
    wait(page, lambda: server.metric("running") == 0)
    element(page, "clear").click()
    assert not page.find_elements(By.CSS_SELECTOR, ".turn")
    assert "Ask something" in last(page, ".empty").text
    say(page, "What is a kangaroo?")
    answered(page)
    assert last(page, ".assistant .text").text.startswith("A kangaroo is")
    assert not page.find_elements(By.CSS_SELECTOR, ".think")


def test_new_chat_while_a_reply_runs(page, server):
    if element(page, "thinking").is_selected():
        element(page, "thinking").click()
    for _ in range(5):  # at different moments of the reply
        say(page, "What is a lighthouse?")
        element(page, "clear").click()
        wait(page, lambda: element(page, "send").is_displayed() and server.metric("running") == 0)
        assert page.execute_script("return messages.length") == 0  # nothing of the old one comes into the new one
        assert not page.find_elements(By.CSS_SELECTOR, ".turn")


def test_narrow_window(page):
    page.set_window_size(500, 700)  # about as narrow as a headless window gets
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 360, "height": 640, "deviceScaleFactor": 1, "mobile": False}
    )
    say(page, "What is a " + "very" * 40 + "?")
    answered(page)
    element(page, "toggle").click()
    assert page.execute_script("return document.documentElement.scrollWidth") <= 360
    assert page.execute_script("return document.documentElement.scrollHeight") <= 640
    picture(page, "narrow")
    element(page, "toggle").click()
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    page.set_window_size(900, 800)


def test_error_is_shown(page):
    set_value(page, "tools", "[{]")
    say(page, "Hi")
    answered(page)
    assert "JSON" in last(page, ".error").text
    picture(page, "error")
