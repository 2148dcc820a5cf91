//! A page of a headless Chromium. Clicks and keys are real input events.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use headless_chrome::browser::tab::Tab;
use headless_chrome::protocol::cdp::Page::CaptureScreenshotFormatOption::Png;
use headless_chrome::protocol::cdp::types::{Event, Method};
use headless_chrome::protocol::cdp::{Emulation, Log, Network, Runtime};
use headless_chrome::{Browser, LaunchOptions};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// A page logs this after everything else that it has to say.
const MARK: &str = "the page has said everything";

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// The browser with one page.
pub(crate) struct Page {
    tab: Arc<Tab>,
    /// Complaints and [`MARK`], in the order of events.
    said: Receiver<String>,
    /// Ends with this value.
    _browser: Browser,
}

impl Page {
    /// Starts the browser, with a throw-away profile.
    pub(crate) fn start() -> Result<Self> {
        // Pages of ours in a throw-away profile need no sandbox, which containers often cannot give.
        let options = LaunchOptions::default_builder()
            .sandbox(false)
            .args(vec![OsStr::new("--hide-scrollbars")])
            .idle_browser_timeout(PATIENCE)
            .build()?;
        let browser = Browser::new(options).context("Chromium does not start")?;
        let tab = browser.new_tab()?;
        tab.set_default_timeout(PATIENCE);
        let (say, said) = channel();
        tab.add_event_listener(Arc::new(move |event: &Event| {
            // Nobody listens any more when the browser ends.
            said_by(event).into_iter().for_each(|text| drop(say.send(text)));
        }))?;
        let page = Self { tab, said, _browser: browser };
        page.tab.enable_runtime()?.enable_log()?;
        page.call::<Network::Enable>(json!({}))?;
        Ok(page)
    }

    /// Calls a method of the protocol. Parameters that are not given are optional.
    fn call<M>(&self, params: Value) -> Result<M::ReturnObject>
    where
        M: Method + Serialize + DeserializeOwned + std::fmt::Debug,
    {
        self.tab.call_method(serde_json::from_value::<M>(params)?)
    }

    /// Opens a file and waits until it is there.
    pub(crate) fn open(&self, path: &Path) -> Result<()> {
        let path = path.canonicalize().with_context(|| path.display().to_string())?;
        self.tab.navigate_to(&format!("file://{}", path.display()))?.wait_until_navigated()?;
        Ok(())
    }

    /// The value of an expression in the page, or of the promise that it makes.
    pub(crate) fn eval(&self, expression: &str) -> Result<Value> {
        let params = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let answer = self.call::<Runtime::Evaluate>(params)?;
        match answer.exception_details {
            Some(details) => bail!("{expression}: {details:?}"),
            None => Ok(answer.result.value.unwrap_or(Value::Null)),
        }
    }

    /// Clicks on the middle of the first element that a selector finds.
    pub(crate) fn click(&self, selector: &str) -> Result<()> {
        let element = self.tab.find_element(selector).with_context(|| format!("the page has no {selector}"))?;
        element.click().with_context(|| format!("a click on {selector}"))?;
        Ok(())
    }

    /// Presses and releases a key.
    pub(crate) fn key(&self, key: &str) -> Result<()> {
        self.tab.press_key(key)?;
        Ok(())
    }

    /// A light or a dark screen of this width; without a height, as high as the page.
    pub(crate) fn screen(&self, dark: bool, width: u32, height: Option<u64>) -> Result<()> {
        let scheme = json!({ "name": "prefers-color-scheme", "value": if dark { "dark" } else { "light" } });
        self.call::<Emulation::SetEmulatedMedia>(json!({ "features": [scheme] }))?;
        let metrics =
            |height: u64| json!({ "width": width, "height": height, "deviceScaleFactor": 1.0, "mobile": false });
        self.call::<Emulation::SetDeviceMetricsOverride>(metrics(height.unwrap_or(800)))?;
        if height.is_none() {
            let whole = self.eval("document.documentElement.scrollHeight")?.as_u64().context("a height")?;
            self.call::<Emulation::SetDeviceMetricsOverride>(metrics(whole))?;
        }
        Ok(())
    }

    /// The screen as a PNG.
    pub(crate) fn picture(&self) -> Result<Vec<u8>> {
        self.tab.capture_screenshot(Png, None, None, true)
    }

    /// What went wrong in the page since the last question, and every address but a file's that it wanted.
    pub(crate) fn complaints(&self) -> Result<Vec<String>> {
        self.eval(&format!("console.debug('{MARK}')"))?;
        let mut complaints = Vec::new();
        loop {
            let said = self.said.recv_timeout(PATIENCE).context("the browser does not answer")?;
            if said == MARK {
                return Ok(complaints);
            }
            complaints.push(said);
        }
    }
}

/// A complaint or [`MARK`], if the event is one.
fn said_by(event: &Event) -> Option<String> {
    use Runtime::ConsoleAPICalledEventTypeOption::{Debug, Error};
    match event {
        Event::RuntimeExceptionThrown(event) => Some(format!("{:?}", event.params.exception_details)),
        Event::LogEntryAdded(event) => {
            let entry = &event.params.entry;
            (entry.level == Log::LogEntryLevel::Error).then(|| entry.text.clone())
        }
        Event::RuntimeConsoleAPICalled(event) => {
            let text = event.params.args.iter().find_map(|arg| arg.value.as_ref()?.as_str());
            match event.params.Type {
                Error => Some(text.unwrap_or("console.error").to_owned()),
                Debug => text.filter(|&text| text == MARK).map(str::to_owned),
                _ => None,
            }
        }
        Event::NetworkRequestWillBeSent(event) => {
            let url = &event.params.request.url;
            (!url.starts_with("file:")).then(|| format!("asked for {url}"))
        }
        _ => None,
    }
}
