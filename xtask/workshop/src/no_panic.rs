//! `cargo xtask no-panic`: proves that no engine of `attn-core` can panic, on the machine code.
//!
//! `no-panic` calls everything with arguments that the optimiser cannot see through, and is built as users of
//! firmware build: release, one unit, link-time optimisation. The archive is then read, and from every entry point the
//! relocations are followed (calls, tables of functions, constants) as a linker that drops unused sections would. If
//! `core::panicking` can be reached, the shortest way there is printed. The same is done with an entry that can panic,
//! which must be found: a check that finds nothing in it proves nothing.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use object::read::archive::ArchiveFile;
use object::{Object, ObjectSection, ObjectSymbol, RelocationTarget, SymbolSection};

use crate::process;
use xtask::root::root;

/// What the names of all entry points begin with.
const ENTRY: &str = "attn_entry_";
/// What the names of all ways into a panic contain, in either mangling.
const PANIC: &str = "panicking";
/// The images looked at: the host's (by no name), and a microcontroller's.
const TARGETS: [Option<&str>; 2] = [None, Some("thumbv7em-none-eabihf")];

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_: Args) -> ExitCode {
    process::end_group_on_interrupt();
    for target in TARGETS {
        let name = target.unwrap_or("host");
        for control in [false, true] {
            let image = build(target, control).and_then(|path| fs::read(path).map_err(|error| error.to_string()));
            let reached = match image.and_then(|bytes| Image::read(&bytes)?.search()) {
                Ok(reached) => reached,
                Err(message) => {
                    eprintln!("no-panic: {name}: {message}");
                    return ExitCode::FAILURE;
                }
            };
            let Reached { entries, sections, ways } = reached;
            match (control, ways.is_empty()) {
                (false, true) => {
                    println!("{name}: {entries} entry points reach {sections} sections, no panic among them")
                }
                (true, false) => println!("{name}: the entry that can panic is found: {}", ways.join("; ")),
                (false, false) => {
                    println!("{name}: a panic can be reached:");
                    ways.iter().for_each(|way| println!("    {way}"));
                    return ExitCode::FAILURE;
                }
                (true, true) => {
                    println!("{name}: an entry that can panic was not found: the check is broken");
                    return ExitCode::FAILURE;
                }
            }
        }
    }
    ExitCode::SUCCESS
}

/// Builds the image and gives the path of its archive.
fn build(target: Option<&str>, control: bool) -> Result<PathBuf, String> {
    let folder = root().join("target/ci/no-panic");
    fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let path = folder.join("build.log");
    let log = File::create(&path).map_err(|error| error.to_string())?;
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["build", "--release", "--locked"]).current_dir(root().join("no-panic"));
    command.arg("--target-dir").arg(&folder);
    if let Some(target) = target {
        command.args(["--target", target]);
    }
    if control {
        command.args(["--features", "control"]);
    }
    if !process::run(command, &log, Duration::from_secs(600)).is_success() {
        return Err(format!("the image does not build:\n{}", fs::read_to_string(&path).unwrap_or_default()));
    }
    Ok(target.map_or(folder.clone(), |target| folder.join(target)).join("release/libattn_no_panic.a"))
}

/// A section of one of the archive's objects: their numbers.
type Place = (usize, usize);

/// Where each section leads, and what stands where.
#[derive(Default)]
struct Image {
    /// Section and name of each function and object that has a name.
    names: BTreeMap<Place, Vec<String>>,
    /// Where a global name is defined.
    globals: HashMap<String, Place>,
    /// What each section's relocations point to.
    edges: HashMap<Place, Vec<Edge>>,
}

/// One relocation's target.
enum Edge {
    Section(Place),
    Name(String),
}

/// What can be reached from the entry points.
struct Reached {
    entries: usize,
    sections: usize,
    /// From an entry to a panic, as names.
    ways: Vec<String>,
}

impl Image {
    fn read(bytes: &[u8]) -> Result<Self, String> {
        let archive = ArchiveFile::parse(bytes).map_err(|error| error.to_string())?;
        let mut image = Self::default();
        for (number, member) in archive.members().enumerate() {
            let member = member.map_err(|error| error.to_string())?;
            // What is not an object file is the compiler's metadata.
            if member.name().ends_with(b".o") {
                let data = member.data(bytes).map_err(|error| error.to_string())?;
                let object = object::File::parse(data).map_err(|error| error.to_string())?;
                image.add(number, &object);
            }
        }
        Ok(image)
    }

    fn add(&mut self, number: usize, object: &object::File<'_>) {
        for symbol in object.symbols() {
            let (SymbolSection::Section(section), Ok(name)) = (symbol.section(), symbol.name()) else { continue };
            // `$t`, `$d` mark the kind of code on Arm; sections' own symbols have no name.
            if name.is_empty() || name.starts_with('$') {
                continue;
            }
            let place = (number, section.0);
            self.names.entry(place).or_default().push(name.to_owned());
            if symbol.is_global() {
                self.globals.entry(name.to_owned()).or_insert(place);
            }
        }
        for section in object.sections() {
            let place = (number, section.index().0);
            for (_, relocation) in section.relocations() {
                let edge = match relocation.target() {
                    RelocationTarget::Section(to) => Edge::Section((number, to.0)),
                    RelocationTarget::Symbol(index) => {
                        let Ok(symbol) = object.symbol_by_index(index) else { continue };
                        match (symbol.section(), symbol.name()) {
                            (SymbolSection::Section(to), _) => Edge::Section((number, to.0)),
                            (_, Ok(name)) => Edge::Name(name.to_owned()),
                            _ => continue,
                        }
                    }
                    _ => continue,
                };
                self.edges.entry(place).or_default().push(edge);
            }
        }
    }

    /// Breadth first from the entry points, so that the first way found is a shortest one.
    fn search(&self) -> Result<Reached, String> {
        let is_entry = |names: &[String]| names.iter().any(|name| name.starts_with(ENTRY));
        let entries: Vec<Place> =
            self.names.iter().filter(|(_, names)| is_entry(names)).map(|(place, _)| *place).collect();
        if entries.is_empty() {
            return Err(format!("the image has no entry point {ENTRY}…"));
        }
        let mut from: HashMap<Place, Option<Place>> = entries.iter().map(|place| (*place, None)).collect();
        let mut queue: VecDeque<Place> = entries.iter().copied().collect();
        let mut ways = Vec::new();
        while let Some(place) = queue.pop_front() {
            if self.is_panic(place) {
                ways.push(self.way(place, &from));
                continue;
            }
            for edge in self.edges.get(&place).into_iter().flatten() {
                let to = match edge {
                    Edge::Section(to) => *to,
                    Edge::Name(name) => match self.globals.get(name) {
                        Some(to) => *to,
                        None if name.contains(PANIC) => {
                            ways.push(format!("{} -> {}", self.way(place, &from), demangled(name)));
                            continue;
                        }
                        None => continue, // memcpy and its like, which the linker's libraries bring
                    },
                };
                from.entry(to).or_insert_with(|| {
                    queue.push_back(to);
                    Some(place)
                });
            }
        }
        Ok(Reached { entries: entries.len(), sections: from.len(), ways })
    }

    fn is_panic(&self, place: Place) -> bool {
        self.names.get(&place).is_some_and(|names| names.iter().any(|name| name.contains(PANIC)))
    }

    fn way(&self, mut place: Place, from: &HashMap<Place, Option<Place>>) -> String {
        let mut names = vec![self.name(place)];
        while let Some(Some(before)) = from.get(&place) {
            names.push(self.name(*before));
            place = *before;
        }
        names.reverse();
        names.join(" -> ")
    }

    fn name(&self, place: Place) -> String {
        let first = self.names.get(&place).and_then(|names| names.first());
        first.map_or_else(|| "a constant".to_owned(), |name| demangled(name))
    }
}

/// A name as people write it.
fn demangled(name: &str) -> String {
    format!("{:#}", rustc_demangle::demangle(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(edges: &[(usize, usize)], names: &[(usize, &str)]) -> Image {
        let place = |n: usize| (0, n);
        let mut image = Image::default();
        for &(n, name) in names {
            image.names.entry(place(n)).or_default().push(name.to_owned());
            image.globals.insert(name.to_owned(), place(n));
        }
        for &(a, b) in edges {
            image.edges.entry(place(a)).or_default().push(Edge::Section(place(b)));
        }
        image
    }

    #[test]
    fn only_what_an_entry_reaches_counts() {
        let names = [(1, "attn_entry_a"), (2, "helper"), (3, "core::panicking::panic_fmt"), (4, "unused")];
        let clean = image(&[(1, 2), (2, 1), (4, 3)], &names).search().expect("an entry");
        assert_eq!((clean.entries, clean.sections, clean.ways.len()), (1, 2, 0));
        let dirty = image(&[(1, 2), (2, 3), (4, 3)], &names).search().expect("an entry");
        assert_eq!(dirty.ways, ["attn_entry_a -> helper -> core::panicking::panic_fmt"]);
    }

    #[test]
    fn a_panic_that_is_only_declared_counts_too() {
        let mut image = image(&[], &[(1, "attn_entry_a")]);
        let edge = Edge::Name("core::panicking::panic".to_owned());
        image.edges.entry((0, 1)).or_default().push(edge);
        assert_eq!(image.search().expect("an entry").ways.len(), 1);
    }

    #[test]
    fn an_image_without_entries_is_an_error() {
        assert!(image(&[], &[(1, "main")]).search().is_err());
    }
}
