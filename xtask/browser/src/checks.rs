//! What the pages show, what clicks and keys do, on light and dark, wide and narrow screens.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use attn_layers::worked_example::{CAUSAL_CONTEXT, CAUSAL_WEIGHTS, K, Q, SCALED_SCORES, V, WEIGHTS};
use serde_json::{Value, json};

use crate::page::Page;

/// The words of `words.html`, which look like HTML.
const HOSTILE: [&str; 4] = ["</script><b>x</b>", "<img src=x onerror=document.title='broken'>", "&amp;", "\"'`${1}"];

/// Tokens of `long.html`: as many as a page of words may have.
const LONGEST: usize = 128;

/// Elements of a row of `layers.html`.
const LONG_DIM: usize = 32;

/// The page's own words for the contrast of the text in each cell of the map with its ground (WCAG 2: 4.5 is enough for
/// text).
const LEAST_CONTRAST: &str = "(() => {
  const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const light = (c) => { const p = c.match(/[0-9.]+/g).map((x) => linear(x / 255));
    return 0.2126 * p[0] + 0.7152 * p[1] + 0.0722 * p[2]; };
  return Math.min(...[...document.querySelectorAll('#map td[data-key], .vector span, #map tr.on th')].map((node) => {
    const style = getComputedStyle(node);
    const [a, b] = [light(style.color), light(style.backgroundColor)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  }));
})()";

/// Uses all pages of a folder and gives how many checks passed.
pub(crate) fn run(folder: &Path) -> Result<usize> {
    let page = Page::start()?;
    let mut checks = Checks { page: &page, folder, done: 0 };
    checks.complaints_are_heard()?;
    checks.worked_example()?;
    checks.two_heads()?;
    checks.layers()?;
    checks.hostile_words()?;
    checks.long()?;
    checks.other_keys()?;
    Ok(checks.done)
}

struct Checks<'p> {
    page: &'p Page,
    folder: &'p Path,
    done: usize,
}

impl Checks<'_> {
    fn open(&self, name: &str) -> Result<()> {
        self.page.screen(false, 1280, Some(800))?;
        self.page.open(&self.folder.join(name).with_extension("html"))
    }

    /// An expression in the page must have this value.
    fn expect(&mut self, what: &str, expression: &str, wanted: impl Into<Value>) -> Result<()> {
        let (found, wanted) = (self.page.eval(expression)?, wanted.into());
        ensure!(found == wanted, "{what}: the page has {found}, it should be {wanted}");
        self.done += 1;
        Ok(())
    }

    /// The texts of all elements that a selector finds.
    fn expect_texts(&mut self, what: &str, selector: &str, wanted: &[String]) -> Result<()> {
        let expression = format!("[...document.querySelectorAll({})].map((x) => x.textContent)", Value::from(selector));
        self.expect(what, &expression, json!(wanted))
    }

    /// An error that the page logs or throws, and an address that it wants, would be noticed.
    fn complaints_are_heard(&mut self) -> Result<()> {
        let faults = [
            "console.error('logged'), true",
            "new Promise((done) => setTimeout(() => { setTimeout(done, 0, true); throw new Error('thrown'); }))",
            "fetch('data:,wanted').then(() => true)",
        ];
        for fault in faults {
            self.expect("a fault on purpose", fault, true)?;
        }
        let complaints = self.page.complaints()?.join("; ");
        for wanted in ["logged", "thrown", "asked for data:,wanted"] {
            ensure!(
                complaints.contains(wanted),
                "the browser does not tell of errors: {wanted} is not in `{complaints}`"
            );
            self.done += 1;
        }
        Ok(())
    }

    fn worked_example(&mut self) -> Result<()> {
        self.open("example")?;
        let cells = |weights: &[[f64; 6]; 6], causal: bool| -> Vec<String> {
            let cell = |i: usize, j: usize| if causal && j > i { "-".into() } else { format!("{:.2}", weights[i][j]) };
            (0..36).map(|n| cell(n / 6, n % 6)).collect()
        };
        self.expect("title", "document.querySelector('h1').textContent", "The cat sat on the mat")?;
        self.expect_texts("causal weights", "#map td[data-key]", &cells(&CAUSAL_WEIGHTS, true))?;
        self.expect("keys not seen", "document.querySelectorAll('#map td.hidden').length", 15)?;
        self.expect("one head needs no choice", "document.querySelectorAll('#heads button').length", 0)?;

        // A click on a token shows its row.
        self.page.click("#map tbody tr:nth-child(2) th")?;
        let title = "document.querySelector('#token-title').textContent";
        self.expect("the token that was clicked", title, "Token 2: “cat”")?;
        let column = |at: usize| format!("#row tbody td:nth-child({at})");
        let four = |x: f64| format!("{x:.4}");
        let row = |row: &[f64; 6]| (0..6).map(|j| if j < 2 { four(row[j]) } else { "-".into() }).collect::<Vec<_>>();
        self.expect_texts("its scores", &column(2), &row(&SCALED_SCORES[1]))?;
        self.expect_texts("its weights", &column(3), &row(&CAUSAL_WEIGHTS[1]))?;
        for (symbol, values) in [("Q", Q[1]), ("K", K[1]), ("V", V[1]), ("Output", CAUSAL_CONTEXT[1])] {
            self.expect_texts(symbol, &format!("#vector-{symbol} span"), &values.map(four))?;
        }

        // Keys walk, and the page says where they are.
        self.page.key("ArrowDown")?;
        self.expect("arrow down", title, "Token 3: “sat”")?;
        self.page.key("ArrowRight")?;
        let status = "document.querySelector('#status').textContent";
        self.expect("arrow right", status, "“sat” gives 13.1 % of its attention to “The”.")?;
        self.page.key("End")?;
        self.expect("a hidden key", status, "“sat” does not see “mat”.")?;
        self.page.key("PageDown")?;
        self.expect("the last row", status, "“mat” gives 14.1 % of its attention to “mat”.")?;
        let focus = "document.activeElement.dataset.query + ',' + document.activeElement.dataset.key";
        self.expect("focus follows", focus, "5,5")?;
        self.page.click("#map tbody tr:nth-child(4) td:nth-child(3)")?;
        self.expect("a click on a cell", status, "“on” gives 30.8 % of its attention to “cat”.")?;

        // The other mask, and the weights after dropout.
        self.page.click("input[name=mask][value='1']")?;
        self.expect_texts("weights without a mask", "#map td[data-key]", &cells(&WEIGHTS, false))?;
        self.page.click("input[name=view][value=after]")?;
        let doubled = "[...document.querySelectorAll('#row tbody tr')].every((row) => { const [, before, after] = \
            [...row.querySelectorAll('td')].map((x) => Number(x.textContent)); \
            return after === 0 || Math.abs(after - 2 * before) < 3e-4; })";
        self.expect("after dropout a weight is 0 or twice itself", doubled, true)?;
        let dropped =
            "(() => { const d = document.querySelectorAll('#map td.dropped').length; return 5 < d && d < 31; })()";
        self.expect("about half of the weights are dropped", dropped, true)?;
        self.page.click("input[name=view][value=before]")?;
        self.expect_texts("back again", "#map td[data-key]", &cells(&WEIGHTS, false))?;
        self.page.click("input[name=mask][value='0']")?;
        self.looks("example")
    }

    fn two_heads(&mut self) -> Result<()> {
        self.open("heads")?;
        self.expect("a picture per head", "document.querySelectorAll('#heads canvas').length", 2)?;
        let texts = "[...document.querySelectorAll('#map td')].map((x) => x.textContent).join()";
        let first = self.page.eval(texts)?;
        self.page.click("#heads button:nth-child(2)")?;
        self.expect(
            "the head that was clicked",
            "document.querySelector('#map-title').textContent.slice(0, 7)",
            "Head 2 ",
        )?;
        let same = format!("{texts} === {first}");
        self.expect("heads differ", &same, false)?;
        self.looks("heads")
    }

    /// As a model has it: layers to choose from, heads whose vectors are too long for numbers, no mask.
    fn layers(&mut self) -> Result<()> {
        self.open("layers")?;
        self.expect("a mask that cannot be chosen", "document.querySelectorAll('input[name=mask]').length", 0)?;
        self.page.click("#heads button:nth-child(3)")?;
        let texts = "[...document.querySelectorAll('#map td')].map((x) => x.textContent).join()";
        let first = self.page.eval(texts)?;
        self.page.eval("document.querySelector('#layer').focus()")?;
        self.page.key("ArrowDown")?;
        let title = "document.querySelector('#map-title').textContent";
        self.expect("the layer that was chosen", title, "Layer 2 · Head 3 · Weights after softmax")?;
        self.expect("layers differ", &format!("{texts} === {first}"), false)?;
        self.expect("a cell per dimension", "document.querySelectorAll('#vector-Q.long span').length", LONG_DIM)?;
        self.looks("layers")
    }

    fn hostile_words(&mut self) -> Result<()> {
        self.open("words")?;
        self.expect_texts("words are text", "#map tbody th", &HOSTILE.map(str::to_owned))?;
        self.expect("no element came of them", "document.querySelectorAll('img, #map b, h1 *').length", 0)?;
        self.expect("nothing ran", "document.title === 'broken'", false)?;
        self.looks("words")
    }

    fn long(&mut self) -> Result<()> {
        self.open("long")?;
        let count = "document.querySelectorAll('#map td[data-key]').length";
        self.expect("a cell per query and key", count, LONGEST * LONGEST)?;
        self.looks("long")
    }

    /// Keys that are other tokens than queries: their vectors are shown if a key is chosen.
    fn other_keys(&mut self) -> Result<()> {
        self.open("keys")?;
        self.expect("a cell per query and key", "document.querySelectorAll('#map td[data-key]').length", 15)?;
        let keys: Vec<String> = (1..=5).map(|n| format!("key{n}")).collect();
        self.expect_texts("keys above the columns", "#map thead th", &keys)?;
        let vectors = "[...document.querySelectorAll('#vectors .vector')].map((x) => x.id.slice(7)).join()";
        self.expect("vectors of the query", vectors, "Q,Output")?;
        self.page.click("#map tbody tr:nth-child(2) td:nth-child(6)")?;
        self.expect("and of the key", vectors, "Q,K,V,Output")?;
        let status = "document.querySelector('#status').textContent.replace(/[0-9.]+ %/, 'some')";
        self.expect("both are named", status, "“query2” gives some of its attention to “key5”.")?;
        self.page.key("End")?;
        self.expect("the last key stays", status, "“query2” gives some of its attention to “key5”.")?;
        self.looks("keys")
    }

    /// On every kind of screen: text can be read, nothing is wider than the window, nobody complained.
    fn looks(&mut self, name: &str) -> Result<()> {
        for (dark, width) in [(false, 1280), (true, 1280), (true, 390)] {
            self.page.screen(dark, width, None)?;
            let screen = format!("{name}, {}, {width} wide", if dark { "dark" } else { "light" });
            self.expect(&format!("{screen}: contrast"), &format!("{LEAST_CONTRAST} >= 4.5"), true)?;
            let fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth";
            self.expect(&format!("{screen}: width"), fits, true)?;
            let file = self.folder.join(format!("{name}-{}-{width}.png", if dark { "dark" } else { "light" }));
            std::fs::write(&file, self.page.picture()?).with_context(|| file.display().to_string())?;
        }
        let complaints = self.page.complaints()?;
        ensure!(complaints.is_empty(), "{name}: {}", complaints.join("; "));
        Ok(())
    }
}
