"""The lens in headless Chromium: what a user types, clicks and sees."""

import regard
from tests.browser.conftest import Served
from tests.browser.page import Page

TEXT = "one two three"


def link(text: str = TEXT, **view: str) -> str:
    return "&".join([f"q={text.replace(' ', '+')}", *(f"{name}={value}" for name, value in view.items())])


def test_typing_a_sentence_shows_the_translation_of_the_command_line(page: Page, served: Served) -> None:
    run = regard.load(served.runs["translator"], "cpu")
    page.open()
    page.type("four five six")
    assert page.output() == " ".join(run.translate("four five six").split())
    assert page.text(".source").split("\n")[-1].startswith("four five six")
    assert abs(page.score() - run.translations("four five six")[0].score) < 6e-4
    page.type("seven eight")
    assert page.output() == " ".join(run.translate("seven eight").split())


def test_first_page_shows_a_validation_example(page: Page) -> None:
    page.open()
    assert page.one("#text").get_attribute("value")
    assert page.output()


def test_switching_a_head_off_changes_the_numbers_at_once_and_back(page: Page) -> None:
    page.open(link(k="decoder.cross"))
    before = (page.score(), page.probabilities())
    page.click('[data-switch="1.0"]')
    off = (page.score(), page.probabilities())
    assert off != before
    assert "against all heads on" in page.text(".delta")
    assert page.one('[data-switch="1.0"]').get_attribute("aria-checked") == "false"
    page.click('[data-switch="1.0"]')
    assert (page.score(), page.probabilities()) == before
    assert not page.all(".delta")


def test_scaling_a_head_changes_the_score(page: Page) -> None:
    page.open(link(k="decoder.cross"))
    before = page.score()
    slide = 'arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event("input"))'
    page.run(slide, page.one("[data-key=factor]"), "0.5")
    page.settle()
    half = page.score()
    assert page.text(".factor output") == "\N{MULTIPLICATION SIGN} 0.50"
    page.run(slide, page.one("[data-key=factor]"), "2")
    page.settle()
    assert len({before, half, page.score()}) == 3
    page.click("[data-key=reset]")
    assert page.score() == before


def test_a_forced_alternative_is_written_and_the_search_continues(page: Page) -> None:
    page.open(link())
    before, score = page.output(), page.score()
    page.click('[data-key="token:0"]')
    other = page.all(".alternative:not(.now)")[0]
    name = other.find_element("css selector", ".name").text.strip("␣")
    page.click(f'[data-key="{other.get_attribute("data-key")}"]')
    assert page.output() != before
    assert page.output().startswith(name)
    assert page.score() < score
    assert len(page.all(".output.forced")) == 1
    page.click("[data-key=release]")
    assert (page.output(), page.score()) == (before, score)


def test_forcing_the_end_ends_the_output(page: Page) -> None:
    page.open(link("one two three four five", f="2"))
    assert page.output() == ""
    assert len(page.all(".written .output")) == 1
    assert not page.all("#tab-beam")


def test_pointing_at_a_token_marks_the_source_tokens_that_it_attends_to(page: Page) -> None:
    page.open(link())
    tokens = "[...document.querySelectorAll('.source .token')]"
    weights = f"return {tokens}.map((token) => Number(token.style.getPropertyValue('--weight')))"
    page.hover('[data-key="token:0"]')
    shown = page.run(weights)
    assert abs(sum(shown) - 1) < 1e-3
    page.hover("h1")
    assert sum(page.run(weights)) == 0
    page.click('[data-key="view:matrix"]')
    page.hover(".picture svg")
    assert "→" in page.text(".picture .value")


def test_two_models_are_compared_side_by_side(page: Page) -> None:
    page.open(link(m="translator", m2="recurrent"))
    assert [panel.text.split()[0] for panel in page.all("#output h2")] == ["translator", "recurrent"]
    left, right = page.all("#output .panel")
    assert left.rect["y"] == right.rect["y"]
    assert left.rect["x"] < right.rect["x"]
    before = page.output(1)
    page.click('[data-switch="0.0"]')
    assert page.output(1) == before
    page.run("document.querySelector('[data-key=compare]').value = ''")
    page.run("document.querySelector('[data-key=compare]').dispatchEvent(new Event('change'))")
    page.settle()
    assert len(page.all("#output .panel")) == 1


def test_a_language_model_continues_a_prompt(page: Page, served: Served) -> None:
    page.open(link("one two", m="language_model"))
    run = regard.load(served.runs["language_model"], "cpu")
    expected = run.generate("one two", beam=1, max_len=20)[0].text
    written = page.run("return document.querySelector('.written').textContent")
    assert "".join(written.replace("↵", "").replace("␣", "").split()) == "".join(expected.split())
    assert page.text("#ask > label") == "Prompt"
    before = page.output()
    page.click(".written .output")
    page.click(".alternative:not(.now)")
    assert page.output() != before
    page.click('[data-switch="0.1"]')
    assert page.all(".delta")


def test_a_classifier_shows_the_probability_of_every_class(page: Page, served: Served) -> None:
    page.open(link(m="classifier"))
    probabilities = regard.load(served.runs["classifier"], "cpu").classify(TEXT).probabilities
    rows = {row.text.split("\n")[0]: row.text.split("\n")[1] for row in page.all(".classes li")}
    assert {name: f"{100 * p:.1f} %" for name, p in probabilities.items()} == rows
    assert not page.all("#tab-beam")
    page.tab("states")
    assert page.all("#views svg")


def test_a_recurrent_model_shows_attention_and_states(page: Page) -> None:
    page.open(link(m="recurrent"))
    before = page.score()
    assert len(page.all(".thumb")) == 1
    page.click('[data-switch="0.0"]')
    assert page.score() != before
    page.tab("states")
    assert len(page.all("#views svg")) == 2


def test_every_view_draws_its_picture(page: Page) -> None:
    page.open(link())
    for tab, pictures in {"beam": 1, "layers": 1, "positions": 2, "states": 2, "attention": 1}.items():
        page.tab(tab)
        assert len(page.all("#views svg")) == pictures, tab
    page.tab("beam")
    assert page.text(".hypotheses .best td:last-child") == page.output()
    page.tab("layers")
    page.hover("#views svg g:last-of-type rect")
    assert "%" in page.text("#views .value")


def test_layers_and_heads_are_counted_from_0_as_in_the_commands(page: Page) -> None:
    page.open(link(k="decoder.cross", l="1", h="3"))
    assert page.text(".picture .title") == "Cross-attention, layer 1, head 3"
    assert [row.text for row in page.all(".grid .layer")] == ["0", "1"]
    assert [cell.text for cell in page.all(".grid .row:first-child .number")] == ["0", "1", "2", "3"]
    labels = {
        label.partition(", o")[0].lower()
        for cell in page.all('.grid [data-key^="head:"], .grid [data-switch]')
        if (label := cell.get_attribute("aria-label"))
    }
    assert labels == {f"layer {layer}, head {head}" for layer in range(2) for head in range(4)}
    page.tab("layers")
    rows = [text.text for text in page.all("#views svg text") if text.get_attribute("text-anchor") == "end"]
    assert rows == ["layer 1", "layer 0", "input"]
    page.tab("states")
    assert [button.text for button in page.all('[data-key^="step:"]')] == ["input", "0", "1"]
    titles = " ".join(title.text for title in page.all("#views .title"))
    assert "Hidden states, layer 1" in titles
    norms = [text.text for text in page.one("#views svg").find_elements("css selector", "text")]
    assert {"input", "layer 0", "layer 1"} <= set(norms)


def test_the_grid_of_heads_is_used_with_the_keyboard(page: Page) -> None:
    page.open(link(k="decoder.cross", l="0"))
    before = page.score()
    page.run("document.querySelector('[data-key=\"head:0.0\"]').focus()")
    page.press("\ue014")  # right
    page.press("\ue015")  # down
    assert page.run("return document.activeElement.dataset.key") == "head:1.1"
    assert page.one(".selected .thumb").get_attribute("data-key") == "head:1.1"
    page.press("o")
    assert page.one('[data-switch="1.1"]').get_attribute("aria-checked") == "false"
    assert page.score() != before
    assert page.run("return document.activeElement.dataset.key") == "head:1.1"
    page.run("document.getElementById('tab-attention').focus()")
    page.press("\ue014")
    assert page.one("#tab-beam").get_attribute("aria-selected") == "true"
    assert page.run("return document.activeElement.id") == "tab-beam"


def test_everything_can_be_reached_with_tab_and_has_a_name(page: Page) -> None:
    page.open(link())
    names = """
        return [...document.querySelectorAll("button, input, select, textarea")].filter((x) =>
          !(x.getAttribute("aria-label") || x.textContent.trim() || x.labels?.length)).map((x) => x.outerHTML)
    """
    assert page.run(names) == []
    seen = set()
    page.run("document.getElementById('text').focus()")
    for _ in range(40):
        seen.add(page.run("return document.activeElement.dataset.key ?? document.activeElement.id"))
        page.press("\ue004")
    assert {"text", "beam", "token:0", "tab:attention", "kind:decoder.cross", "unit:subwords", "factor", "off"} <= seen


def test_the_link_to_the_output_keeps_the_view(page: Page) -> None:
    page.open(link(k="encoder.self", l="0"))
    before = (page.output(), page.driver.current_url)
    page.run('document.querySelector(".skip").click()')
    page.settle()
    assert (page.output(), page.driver.current_url) == before
    assert page.driver.switch_to.active_element.get_attribute("id") == "output"


def test_light_and_dark_follow_the_system_and_the_switch(page: Page) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    page.open(link())
    light = page.run(background)
    page.click('[data-key="theme:dark"]')
    dark = page.run(background)
    assert dark != light
    page.click('[data-key="theme:auto"]')
    media = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    assert page.run(background) == dark
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_nothing_is_wider_than_a_telephone(page: Page) -> None:
    page.resize(360, 800)
    page.open(link("nine eight seven six five", w="0"))
    for tab in ("attention", "beam", "layers", "positions", "states"):
        page.tab(tab)
        assert page.run("return document.documentElement.scrollWidth") <= 360, tab


def test_the_address_reproduces_the_view(page: Page) -> None:
    page.open(link())
    page.click('[data-key="kind:encoder.self"]')
    page.click('[data-key="head:0.1"]')
    page.click('[data-switch="0.1"]')
    page.click('[data-key="view:matrix"]')
    page.click('[data-key="unit:words"]')
    page.click('[data-key="token:1"]')
    page.click(".alternative:not(.now)")
    seen = (page.output(), page.score(), page.text(".picture .title"), page.text(".alternatives"))
    page.open(str(page.run("return location.hash")).removeprefix("#"))
    assert (page.output(), page.score(), page.text(".picture .title"), page.text(".alternatives")) == seen
    assert page.one('[data-key="unit:words"]').get_attribute("aria-checked") == "true"
    assert page.one('[data-switch="0.1"]').get_attribute("aria-checked") == "false"


def test_text_is_never_read_as_html(page: Page) -> None:
    page.open()
    page.type("<img src=x onerror=document.title=1> </textarea><script>alert(1)</script>")
    assert not page.all("main img, #output script, #views script")
    assert "<img" in str(page.one("#text").get_attribute("value"))
    assert page.run("return document.title") != "1"


def test_a_problem_is_one_sentence_and_the_page_stays(page: Page) -> None:
    page.open(link())
    before = page.output()
    page.open(link("one " * 1200))
    assert "4,800 characters" in page.text(".problem")
    page.open(link(x="decoder.cross:7.0=0"))
    assert "no head" in page.text(".problem")
    page.open(link())
    assert page.output() == before
    page.open(link(m="nothing"))
    assert "no model nothing" in page.text("#notice")
    assert page.output() == before
    for view in ("m=other", "", link(l="-1", z="-2", s="-1"), link()):  # the address changes, and the page stays open
        page.run("location.hash = arguments[0]", view)
        page.settle()
        assert page.output()
        assert ("no model other" in page.text("#notice")) == (view == "m=other")
    assert page.output() == before
    page.check_logs("422")


def test_a_server_that_stopped_is_one_sentence(page: Page) -> None:
    page.open(link())
    page.run("window.fetch = () => Promise.reject(new TypeError('gone'))")
    page.type("nine nine")
    assert "The server does not answer" in page.text(".problem")
    assert page.output()
