//! The page in a real browser: what it shows, what clicks and keys do, on light and dark, wide and narrow screens.
//!
//! Pages are made for the purpose: the worked example in one and in two heads, words that look like HTML, and the
//! longest sequence.

use std::path::Path;

use attn_core::{Layout, View};
use attn_layers::worked_example::{CAUSAL_CONTEXT, CAUSAL_WEIGHTS, K, Q, SCALED_SCORES, TOKENS, V, WEIGHTS};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use super::browser::Browser;
use super::scene::{self, Drop, Look, Scene};
use super::{MAX_TOKENS, example, page, write};

/// What every page drops.
const DROP: Option<Drop> = Some(Drop { p: 0.5, seed: 1 });

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

/// Uses the page and gives a line about it, or what is wrong.
pub(super) fn run(folder: &Path) -> Result<String, String> {
    let mut browser = Browser::start(folder)?;
    let mut checks = Checks { browser: &mut browser, folder, done: 0 };
    checks.worked_example()?;
    checks.two_heads()?;
    checks.layers()?;
    checks.hostile_words()?;
    checks.long()?;
    let done = checks.done;
    drop(browser);
    let _ = std::fs::remove_dir_all(folder.join("profile"));
    Ok(format!("browser: {done} checks passed; pictures in {}", folder.display()))
}

struct Checks<'b> {
    browser: &'b mut Browser,
    folder: &'b Path,
    done: usize,
}

impl Checks<'_> {
    fn open(&mut self, name: &str, tokens: &[&str], heads: usize) -> Result<(), String> {
        self.open_scene(name, &example::scene(tokens, heads, &[Look::Causal, Look::All], DROP)?)
    }

    fn open_scene(&mut self, name: &str, scene: &Scene) -> Result<(), String> {
        let path = self.folder.join(name);
        write(&path, page::html(scene).as_bytes())?;
        self.browser.screen(false, 1280, 800)?;
        self.browser.open(&path)
    }

    /// An expression in the page must have this value.
    fn expect(&mut self, what: &str, expression: &str, wanted: impl Into<Value>) -> Result<(), String> {
        let (found, wanted) = (self.browser.eval(expression)?, wanted.into());
        self.done += 1;
        if found == wanted { Ok(()) } else { Err(format!("{what}: the page has {found}, it should be {wanted}")) }
    }

    /// The texts of all elements that a selector finds.
    fn expect_texts(&mut self, what: &str, selector: &str, wanted: &[String]) -> Result<(), String> {
        let expression = format!("[...document.querySelectorAll({})].map((x) => x.textContent)", Value::from(selector));
        self.expect(what, &expression, json!(wanted))
    }

    fn worked_example(&mut self) -> Result<(), String> {
        self.open("example.html", &TOKENS, 1)?;
        let cells = |weights: &[[f64; 6]; 6], causal: bool| -> Vec<String> {
            let cell = |i: usize, j: usize| if causal && j > i { "-".into() } else { format!("{:.2}", weights[i][j]) };
            (0..36).map(|n| cell(n / 6, n % 6)).collect()
        };
        self.expect("title", "document.querySelector('h1').textContent", "The cat sat on the mat")?;
        self.expect_texts("causal weights", "#map td[data-key]", &cells(&CAUSAL_WEIGHTS, true))?;
        self.expect("keys not seen", "document.querySelectorAll('#map td.hidden').length", 15)?;
        self.expect("one head needs no choice", "document.querySelectorAll('#heads button').length", 0)?;

        // A click on a token shows its row.
        self.browser.click("#map tbody tr:nth-child(2) th")?;
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
        self.browser.key("ArrowDown", 40)?;
        self.expect("arrow down", title, "Token 3: “sat”")?;
        self.browser.key("ArrowRight", 39)?;
        let status = "document.querySelector('#status').textContent";
        self.expect("arrow right", status, "“sat” gives 13.1 % of its attention to “The”.")?;
        self.browser.key("End", 35)?;
        self.expect("a hidden key", status, "“sat” does not see “mat”.")?;
        self.browser.key("PageDown", 34)?;
        self.expect("the last row", status, "“mat” gives 14.1 % of its attention to “mat”.")?;
        let focus = "document.activeElement.dataset.query + ',' + document.activeElement.dataset.key";
        self.expect("focus follows", focus, "5,5")?;
        self.browser.click("#map tbody tr:nth-child(4) td:nth-child(3)")?;
        self.expect("a click on a cell", status, "“on” gives 30.8 % of its attention to “cat”.")?;

        // The other mask, and the weights after dropout.
        self.browser.click("input[name=mask][value='1']")?;
        self.expect_texts("weights without a mask", "#map td[data-key]", &cells(&WEIGHTS, false))?;
        self.browser.click("input[name=view][value=after]")?;
        let doubled = "[...document.querySelectorAll('#row tbody tr')].every((row) => { const [, before, after] = \
            [...row.querySelectorAll('td')].map((x) => Number(x.textContent)); \
            return after === 0 || Math.abs(after - 2 * before) < 3e-4; })";
        self.expect("after dropout a weight is 0 or twice itself", doubled, true)?;
        let dropped =
            "(() => { const d = document.querySelectorAll('#map td.dropped').length; return 5 < d && d < 31; })()";
        self.expect("about half of the weights are dropped", dropped, true)?;
        self.browser.click("input[name=view][value=before]")?;
        self.expect_texts("back again", "#map td[data-key]", &cells(&WEIGHTS, false))?;
        self.browser.click("input[name=mask][value='0']")?;
        self.looks("example")
    }

    fn two_heads(&mut self) -> Result<(), String> {
        self.open("heads.html", &TOKENS, 2)?;
        self.expect("a picture per head", "document.querySelectorAll('#heads canvas').length", 2)?;
        let texts = "[...document.querySelectorAll('#map td')].map((x) => x.textContent).join()";
        let first = self.browser.eval(texts)?;
        self.browser.click("#heads button:nth-child(2)")?;
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
    fn layers(&mut self) -> Result<(), String> {
        let (heads, seq, dim) = (3, 9, 32);
        let layer = |n: usize| {
            let x: Vec<f32> = (0..heads * seq * dim).map(|i| ((i * (n + 2)) as f32).sin()).collect();
            let x = View::new(&x, Layout::Bhsd, [1, heads, seq, dim])?;
            scene::layer(format!("Layer {n}"), [x; 3], &[Look::All], DROP)
        };
        let layers = (1..=2).map(layer).collect::<attn_core::Result<_>>().map_err(|error| error.to_string())?;
        let tokens = (1..=seq).map(|n| format!("token{n}")).collect();
        let (title, note) = ("Two layers".into(), "Numbers by formula.".into());
        self.open_scene("layers.html", &Scene { title, note, tokens, masks: vec!["none"], dropout: DROP, layers })?;
        self.expect("a mask that cannot be chosen", "document.querySelectorAll('input[name=mask]').length", 0)?;
        self.browser.click("#heads button:nth-child(3)")?;
        let texts = "[...document.querySelectorAll('#map td')].map((x) => x.textContent).join()";
        let first = self.browser.eval(texts)?;
        self.browser.eval("document.querySelector('#layer').focus()")?;
        self.browser.key("ArrowDown", 40)?;
        let title = "document.querySelector('#map-title').textContent";
        self.expect("the layer that was chosen", title, "Layer 2 · Head 3 · Weights after softmax")?;
        self.expect("layers differ", &format!("{texts} === {first}"), false)?;
        self.expect("a cell per dimension", "document.querySelectorAll('#vector-Q.long span').length", dim)?;
        self.looks("layers")
    }

    fn hostile_words(&mut self) -> Result<(), String> {
        let words = ["</script><b>x</b>", "<img src=x onerror=document.title='broken'>", "&amp;", "\"'`${1}"];
        self.open("words.html", &words, 1)?;
        self.expect_texts("words are text", "#map tbody th", &words.map(str::to_owned))?;
        self.expect("no element came of them", "document.querySelectorAll('img, #map b, h1 *').length", 0)?;
        self.expect("nothing ran", "document.title === 'broken'", false)?;
        self.looks("words")
    }

    fn long(&mut self) -> Result<(), String> {
        let tokens: Vec<String> = (0..MAX_TOKENS).map(|n| TOKENS[n % 6].to_owned()).collect();
        self.open("long.html", &tokens.iter().map(String::as_str).collect::<Vec<_>>(), 4)?;
        let count = "document.querySelectorAll('#map td[data-key]').length";
        self.expect("a cell per query and key", count, MAX_TOKENS * MAX_TOKENS)?;
        self.looks("long")
    }

    /// On every kind of screen: text can be read, nothing is wider than the window, nobody complained.
    fn looks(&mut self, name: &str) -> Result<(), String> {
        for (dark, width) in [(false, 1280), (true, 1280), (true, 390)] {
            self.browser.screen(dark, width, 800)?;
            let screen = format!("{name}, {}, {width} wide", if dark { "dark" } else { "light" });
            self.expect(&format!("{screen}: contrast"), &format!("{LEAST_CONTRAST} >= 4.5"), true)?;
            let fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth";
            self.expect(&format!("{screen}: width"), fits, true)?;
            let picture = self.browser.picture()?;
            let file = self.folder.join(format!("{name}-{}-{width}.png", if dark { "dark" } else { "light" }));
            write(&file, &BASE64_STANDARD.decode(picture).map_err(|error| error.to_string())?)?;
        }
        let complaints = self.browser.complaints();
        if complaints.is_empty() { Ok(()) } else { Err(format!("{name}: {}", complaints.join("; "))) }
    }
}
