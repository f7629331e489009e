"""The lens page as a user sees it."""

import json
from typing import Any

from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

LOCAL = ("data:", "blob:", "about:", "chrome:")


class Page:
    def __init__(self, driver: Chrome, address: str) -> None:
        self.driver, self.address = driver, address

    def open(self, view: str = "", address: str | None = None) -> None:
        self.driver.get("about:blank")
        self.driver.get(f"{address or self.address}#{view}")
        self.settle()

    def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def settle(self) -> None:
        """Wait until no panel waits for an answer."""
        script = """
            const busy = document.querySelector('[aria-busy="true"]');
            const ready = document.querySelector("#views .panel") || !document.getElementById("notice").hidden;
            return Boolean(ready) && !busy;
        """
        WebDriverWait(self.driver, 20, 0.05).until(lambda driver: driver.execute_script(script))

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        WebDriverWait(self.driver, 10, 0.05).until(lambda _: self.all(selector), selector)
        return self.all(selector)[0]

    def text(self, selector: str) -> str:
        return self.one(selector).text

    def click(self, selector: str) -> None:
        element = self.one(selector)
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()
        self.settle()

    def tab(self, name: str) -> None:
        self.click(f"#tab-{name}")

    def type(self, text: str) -> None:
        area = self.one("#text")
        area.clear()
        area.send_keys(text, Keys.ENTER)
        self.settle()

    def press(self, *keys: str) -> None:
        self.driver.switch_to.active_element.send_keys(*keys)
        self.settle()

    def hover(self, selector: str) -> None:
        element = self.one(selector)
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        ActionChains(self.driver).move_to_element(element).perform()

    def output(self, panel: int = 0) -> str:
        """Return the output without the names of control tokens, and without the sign for a lone space."""
        line = self.all("#output .panel")[panel].find_element(By.CSS_SELECTOR, ".written")
        script = """
            const copy = arguments[0].cloneNode(true);
            copy.querySelectorAll(".special").forEach((token) => token.remove());
            return copy.textContent.trim();
        """
        return " ".join(str(self.driver.execute_script(script, line)).replace("\u2423", " ").split())

    def score(self, panel: int = 0) -> float:
        text = self.all("#output .panel")[panel].find_element(By.CSS_SELECTOR, ".score").text
        return float(text.replace("\N{MINUS SIGN}", "-"))

    def probabilities(self) -> list[str]:
        return [str(token.get_attribute("title")) for token in self.all(".written .output")]

    def run(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(script, *values)

    def logs(self) -> tuple[list[str], list[str]]:
        """Return the console messages and the addresses of all requests since the last call."""
        messages = [entry["message"] for entry in self.driver.get_log("browser")]
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return messages, sent

    def check_logs(self, allowed: str = "") -> None:
        """Fail for a console message without the text `allowed`, and for a request to another origin."""
        messages, sent = self.logs()
        assert [message for message in messages if not allowed or allowed not in message] == []
        assert [url for url in sent if not url.startswith((self.address, *LOCAL))] == []
