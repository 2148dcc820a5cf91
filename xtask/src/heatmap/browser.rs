//! A headless Chromium that is told what to do over a pipe.
//!
//! It speaks the Chrome DevTools Protocol: JSON messages that end with a zero byte, on descriptors 3 and 4 (a shell
//! moves them there), so that neither a port nor a driver program is needed. Clicks and keys are real input events.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

/// The names it goes by.
const PROGRAMS: &[&str] = &["chromium", "chromium-browser", "google-chrome"];

/// A running browser with one open page.
pub(super) struct Browser {
    process: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    session: Option<String>,
    calls: u64,
    /// What happened and nobody asked for, oldest first.
    events: Vec<Value>,
}

impl Browser {
    /// Starts it, with a profile of its own in `folder`.
    pub(super) fn start(folder: &Path) -> Result<Self, String> {
        let program = PROGRAMS.iter().find(|name| crate::need::is_on_path(name));
        let program = program.ok_or(format!("none of {} is installed", PROGRAMS.join(", ")))?;
        let profile = std::path::absolute(folder.join("profile")).map_err(|error| error.to_string())?;
        let mut process = Command::new("sh")
            .args(["-c", "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>/dev/null", program])
            // A page of ours in a throw-away profile needs no sandbox, which containers often cannot give.
            .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"])
            .args(["--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe"])
            .arg(format!("--user-data-dir={}", profile.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{program}: {error}"))?;
        let (Some(to), Some(from)) = (process.stdin.take(), process.stdout.take()) else {
            return Err("no pipe to the browser".into());
        };
        let from = BufReader::new(from);
        let mut browser = Self { process, to, from, session: None, calls: 0, events: Vec::new() };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", attach)?;
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Network", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({}))?;
        }
        Ok(browser)
    }

    /// Calls a method of the protocol and waits for its answer.
    pub(super) fn call(&mut self, method: &str, params: Value) -> Result<Value, String> {
        self.calls += 1;
        let id = self.calls;
        let mut message = json!({ "id": id, "method": method, "params": params });
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        let sent = self.to.write_all(format!("{message}\0").as_bytes()).and_then(|()| self.to.flush());
        sent.map_err(|error| format!("{method}: {error}"))?;
        loop {
            let mut answer = self.receive()?;
            if answer["id"] != id {
                self.events.push(answer);
                continue;
            }
            return match answer.get("error") {
                Some(error) => Err(format!("{method}: {error}")),
                None => Ok(answer["result"].take()),
            };
        }
    }

    fn receive(&mut self) -> Result<Value, String> {
        let mut bytes = Vec::new();
        self.from.read_until(0, &mut bytes).map_err(|error| error.to_string())?;
        if bytes.pop() != Some(0) {
            return Err("the browser has ended".into());
        }
        serde_json::from_slice(&bytes).map_err(|error| format!("the browser said what is not JSON: {error}"))
    }

    /// Opens a file and waits until it is there. Forgets what happened before.
    pub(super) fn open(&mut self, path: &Path) -> Result<(), String> {
        self.events.clear();
        let path = std::path::absolute(path).map_err(|error| error.to_string())?;
        self.call("Page.navigate", json!({ "url": format!("file://{}", path.display()) }))?;
        while !self.events.iter().any(|event| event["method"] == "Page.loadEventFired") {
            let event = self.receive()?;
            self.events.push(event);
        }
        Ok(())
    }

    /// The value of an expression in the page.
    pub(super) fn eval(&mut self, expression: &str) -> Result<Value, String> {
        let params = json!({ "expression": expression, "returnByValue": true });
        let mut answer = self.call("Runtime.evaluate", params)?;
        match answer.get("exceptionDetails") {
            Some(details) => Err(format!("{expression}: {details}")),
            None => Ok(answer["result"]["value"].take()),
        }
    }

    /// Presses and releases the mouse on the middle of the first element that a selector finds.
    pub(super) fn click(&mut self, selector: &str) -> Result<(), String> {
        let quoted = Value::from(selector).to_string();
        let at = self.eval(&format!(
            "(() => {{ const node = document.querySelector({quoted}); if (!node) return null; \
             node.scrollIntoView({{ block: 'center', inline: 'center' }}); const r = node.getBoundingClientRect(); \
             return [r.x + r.width / 2, r.y + r.height / 2]; }})()"
        ))?;
        let (Some(x), Some(y)) = (at[0].as_f64(), at[1].as_f64()) else {
            return Err(format!("the page has no {selector}"));
        };
        for kind in ["mousePressed", "mouseReleased"] {
            let event = json!({ "type": kind, "x": x, "y": y, "button": "left", "clickCount": 1 });
            self.call("Input.dispatchMouseEvent", event)?;
        }
        Ok(())
    }

    /// Presses and releases a key.
    pub(super) fn key(&mut self, key: &str, code: u32) -> Result<(), String> {
        for kind in ["rawKeyDown", "keyUp"] {
            let event = json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code });
            self.call("Input.dispatchKeyEvent", event)?;
        }
        Ok(())
    }

    /// A light or a dark screen of so many pixels, 0 high for the page's own height.
    pub(super) fn screen(&mut self, dark: bool, width: u32, height: u32) -> Result<(), String> {
        let scheme = if dark { "dark" } else { "light" };
        let feature = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.call("Emulation.setEmulatedMedia", feature)?;
        let metrics = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", metrics)?;
        Ok(())
    }

    /// A picture of the page, as the base64 text of a PNG.
    pub(super) fn picture(&mut self) -> Result<String, String> {
        let mut answer =
            self.call("Page.captureScreenshot", json!({ "format": "png", "captureBeyondViewport": true }))?;
        match answer["data"].take() {
            Value::String(text) => Ok(text),
            _ => Err("the browser took no picture".into()),
        }
    }

    /// What went wrong in the page, and every address but a file's that it asked for.
    pub(super) fn complaints(&self) -> Vec<String> {
        let complaint = |event: &Value| {
            let params = &event["params"];
            match event["method"].as_str()? {
                "Runtime.exceptionThrown" => Some(params["exceptionDetails"].to_string()),
                "Log.entryAdded" if params["entry"]["level"] == "error" => Some(params["entry"]["text"].to_string()),
                "Runtime.consoleAPICalled" if params["type"] == "error" => Some(params["args"].to_string()),
                "Network.requestWillBeSent" => {
                    let url = params["request"]["url"].as_str().unwrap_or_default();
                    (!url.starts_with("file:")).then(|| format!("asked for {url}"))
                }
                _ => None,
            }
        };
        self.events.iter().filter_map(complaint).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        self.session = None;
        if self.call("Browser.close", json!({})).is_err() {
            let _ = self.process.kill(); // it has ended, or will now
        }
        let _ = self.process.wait();
    }
}
