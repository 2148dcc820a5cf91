//! The machine and the build of a measurement. Without these facts its numbers mean nothing, so every report has them.

use std::path::Path;
use std::process::Command;

use attn_simd::Level;
use serde::{Deserialize, Serialize};

use crate::probe;

/// The machine, the build and the command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// CPU model as the system names it.
    pub cpu: String,
    /// Operating system and architecture.
    pub system: String,
    /// Threads that the system would run at once.
    pub cores: usize,
    /// Data caches of the first core, such as `L1 48 KiB`.
    pub caches: Vec<String>,
    /// Instruction-set levels that this machine has.
    pub levels: Vec<String>,
    /// The level that was measured.
    pub level: String,
    /// Threads of the parallel engine.
    pub threads: usize,
    /// The compiler that built this program.
    pub rustc: String,
    /// Profile, target and flags that it was built with.
    pub flags: String,
    /// The revision of the sources, `-dirty` if they were changed; `None` without git.
    pub revision: Option<String>,
    /// The command line.
    pub command: String,
    /// The day, as `2026-11-25`, in universal time.
    pub date: String,
    /// Average number of busy threads over the minute before the run, if known: above 0, others were using the machine.
    pub load_before: Option<String>,
    /// How much of its best rate a small call had in half of the moments before the run, in percent. Far below 100,
    /// something that no load shows slows the processor: another thread of the same core, as the neighbours of a
    /// virtual machine have, or a clock that moves.
    #[serde(default)]
    pub steady_before: Option<u32>,
}

/// Below this share of its best rate a processor is not steady, in percent.
const STEADY: u32 = 90;

impl Machine {
    /// Reads the facts of this machine. A fact that cannot be read is left out.
    pub fn detect(level: Level, threads: usize, command: String) -> Self {
        Self {
            cpu: cpu_model().unwrap_or_else(|| "unknown CPU".into()),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            caches: caches(Path::new("/sys/devices/system/cpu/cpu0/cache")),
            levels: Level::available().map(|level| level.name().to_string()).collect(),
            level: level.name().to_string(),
            threads,
            rustc: env!("ATTN_BENCH_RUSTC").into(),
            flags: env!("ATTN_BENCH_FLAGS").into(),
            revision: output("git", &["describe", "--always", "--dirty", "--abbrev=12"]),
            command,
            date: humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string()[..10].to_string(),
            load_before: std::fs::read_to_string("/proc/loadavg")
                .ok()
                .and_then(|s| s.split_whitespace().next().map(str::to_string)),
            steady_before: Some((100.0 * probe::steadiness(level, 0.1)) as u32),
        }
    }

    /// A warning if others were using the machine before the run: then times are too high and shares too low.
    pub fn disturbed(&self) -> Option<String> {
        if let Some(steady) = self.steady_before.filter(|&steady| steady < STEADY) {
            return Some(format!(
                "The processor was not steady: before the run a small call had {steady} % of its best rate in half of \
                 the moments. Another thread of the core may be busy, as in a virtual machine: times may be too high."
            ));
        }
        let load: f64 = self.load_before.as_ref()?.parse().ok()?;
        let text =
            format!("Other programs were using this machine (load {load:.1} before the run): times may be too high.");
        (load > 0.5).then_some(text)
    }

    /// Name and value of each fact, for tables.
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        let unknown = || "unknown".to_string();
        vec![
            ("CPU", self.cpu.clone()),
            ("System", self.system.clone()),
            ("Cores", self.cores.to_string()),
            ("Caches", if self.caches.is_empty() { unknown() } else { self.caches.join(", ") }),
            ("Levels", self.levels.join(", ")),
            ("Level measured", self.level.clone()),
            ("Threads (parallel)", self.threads.to_string()),
            ("Load before", self.load_before.clone().unwrap_or_else(unknown)),
            ("Steadiness before", self.steady_before.map_or_else(unknown, |steady| format!("{steady} %"))),
            ("Compiler", self.rustc.clone()),
            ("Build", self.flags.clone()),
            ("Revision", self.revision.clone().unwrap_or_else(unknown)),
            ("Command", self.command.clone()),
            ("Date", self.date.clone()),
        ]
    }
}

fn output(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).stderr(std::process::Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_string();
    (output.status.success() && !text.is_empty()).then_some(text)
}

fn cpu_model() -> Option<String> {
    if let Ok(info) = std::fs::read_to_string("/proc/cpuinfo") {
        return model_of(&info);
    }
    output("sysctl", &["-n", "machdep.cpu.brand_string"])
}

/// The model from `/proc/cpuinfo`, with family and model number if it has them: virtual machines often shorten the
/// name.
fn model_of(info: &str) -> Option<String> {
    let field = |name: &str| {
        let (_, value) = info.lines().filter_map(|line| line.split_once(':')).find(|(key, _)| key.trim() == name)?;
        Some(value.trim().to_string()).filter(|value| !value.is_empty())
    };
    let name = field("model name").or_else(|| field("Model")).or_else(|| field("CPU implementer"))?;
    match (field("cpu family"), field("model")) {
        (Some(family), Some(model)) => Some(format!("{name} (family {family}, model {model})")),
        _ => Some(name),
    }
}

fn caches(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for index in 0..8 {
        let read = |name: &str| std::fs::read_to_string(dir.join(format!("index{index}/{name}"))).ok();
        let (Some(level), Some(kind), Some(size)) = (read("level"), read("type"), read("size")) else { continue };
        if kind.trim() != "Instruction" {
            found.push(format!("L{} {}", level.trim(), size.trim().replace('K', " KiB")));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_is_found_in_cpuinfo() {
        let info = "processor : 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n";
        assert_eq!(model_of(info).as_deref(), Some("AMD EPYC (family 26, model 2)"));
        assert_eq!(model_of("model name : Cortex\n").as_deref(), Some("Cortex"));
        assert_eq!(model_of("nothing here"), None);
    }

    #[test]
    fn facts_name_the_level_and_what_was_typed() {
        let level = Level::available().next().unwrap();
        let machine = Machine::detect(level, 3, "cargo xtask bench".into());
        assert!(machine.levels.contains(&level.name().to_string()) && machine.cores > 0);
        let facts = machine.facts();
        assert!(facts.contains(&("Command", "cargo xtask bench".into())));
        assert!(facts.contains(&("Threads (parallel)", "3".into())));
        assert!(machine.date.len() == 10 && machine.date.starts_with("20"), "{}", machine.date);
        assert!(machine.rustc.starts_with("rustc 1.") && machine.flags.contains("opt-level"), "{machine:?}");
    }

    #[test]
    fn a_busy_machine_is_warned_about() {
        let with_load = |load: Option<&str>| Machine { load_before: load.map(str::to_string), ..Machine::default() };
        assert!(with_load(Some("1.70")).disturbed().unwrap().contains("load 1.7"));
        for calm in [None, Some("0.20"), Some("?")] {
            assert_eq!(with_load(calm).disturbed(), None);
        }
        let steady = |steady| Machine { steady_before: steady, ..with_load(Some("0.10")) };
        assert!(steady(Some(55)).disturbed().unwrap().contains("55 %"));
        assert_eq!([steady(Some(97)).disturbed(), steady(None).disturbed()], [None, None]);
    }
}
