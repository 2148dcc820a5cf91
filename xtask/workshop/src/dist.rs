//! `cargo xtask dist`: the C library as it is handed on, in `target/dist`.
//!
//! ```text
//! include/attn.h
//! lib/libattn.so -> libattn.so.0 -> libattn.so.0.1.0    stripped, of a name that states the ABI
//! lib/libattn.a                                         without debug information
//! lib/pkgconfig/*.pc, lib/cmake/attn/*.cmake            relative to themselves: the folder may be moved
//! ```
//!
//! The shared library must export the functions of the header and nothing else.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use object::{Object, ObjectSymbol};

use xtask::root::root;

/// What a program must be linked with beside the static library, as `rustc --print native-static-libs` says for Linux.
const STATIC_NEEDS: &str = "-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc";

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_: Args) -> ExitCode {
    match build() {
        Ok(dist) => {
            println!("{}", dist.display());
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("dist: {message}");
            ExitCode::FAILURE
        }
    }
}

/// The version in its parts; the first one is the ABI's. (Below 1.0 it stays 0: structs only grow at their end.)
fn version() -> (&'static str, &'static str) {
    (env!("CARGO_PKG_VERSION"), env!("CARGO_PKG_VERSION_MAJOR"))
}

/// Builds everything and gives the folder.
pub(crate) fn build() -> Result<PathBuf, String> {
    if !cfg!(target_os = "linux") {
        return Err(
            "only the layout for Linux is written so far; cargo build -p attn-capi --release works anywhere".into()
        );
    }
    let (root, (version, abi)) = (root(), version());
    let soname = format!("libattn.so.{abi}");
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(&root).args(["rustc", "--release", "--quiet", "-p", "attn-capi", "--lib"]);
    command.args(["--crate-type", "cdylib,staticlib", "--", "-C"]).arg(format!("link-arg=-Wl,-soname,{soname}"));
    // Smaller, and what is called once per call is inlined over crates; the kernels are as fast without.
    command.env("CARGO_PROFILE_RELEASE_LTO", "thin").env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "4");
    succeed(&mut command)?;

    let target = std::env::var_os("CARGO_TARGET_DIR").map_or(root.join("target"), PathBuf::from);
    let (from, dist) = (target.join("release"), root.join("target/dist"));
    let _ = fs::remove_dir_all(&dist); // what an earlier version left
    let lib = dist.join("lib");
    for folder in [dist.join("include"), lib.join("pkgconfig"), lib.join("cmake/attn")] {
        fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    copy(&root.join("attn-capi/include/attn.h"), &dist.join("include/attn.h"))?;
    let shared = lib.join(format!("libattn.so.{version}"));
    copy(&from.join("libattn.so"), &shared)?;
    copy(&from.join("libattn.a"), &lib.join("libattn.a"))?;
    succeed(Command::new("strip").arg(&shared))?;
    succeed(Command::new("strip").arg("--strip-debug").arg(lib.join("libattn.a")))?;
    #[cfg(unix)]
    for (link, to) in [(soname.as_str(), format!("libattn.so.{version}")), ("libattn.so", soname.clone())] {
        std::os::unix::fs::symlink(to, lib.join(link)).map_err(|error| format!("{link}: {error}"))?;
    }
    for (path, text) in [
        ("pkgconfig/attn.pc", PKG_CONFIG),
        ("pkgconfig/attn-static.pc", PKG_CONFIG_STATIC),
        ("cmake/attn/attnConfig.cmake", CMAKE),
        ("cmake/attn/attnConfigVersion.cmake", CMAKE_VERSION),
    ] {
        let text = text.replace("{version}", version).replace("{abi}", abi).replace("{needs}", STATIC_NEEDS);
        write(&lib.join(path), &text)?;
    }
    exports(&shared)?;
    for path in [shared, lib.join("libattn.a")] {
        let bytes = fs::metadata(&path).map_err(|error| error.to_string())?.len();
        println!("{:>7} KiB  {}", bytes.div_ceil(1024), path.file_name().unwrap_or_default().to_string_lossy());
    }
    Ok(dist)
}

/// Refuses a library that exports anything but the header's functions.
fn exports(shared: &Path) -> Result<(), String> {
    let bytes = fs::read(shared).map_err(|error| error.to_string())?;
    let file = object::File::parse(&*bytes).map_err(|error| error.to_string())?;
    let defined = file.dynamic_symbols().filter(|symbol| symbol.is_definition());
    let found: BTreeSet<&str> = defined.filter_map(|symbol| symbol.name().ok()).collect();
    let header = fs::read_to_string(root().join("attn-capi/include/attn.h")).map_err(|error| error.to_string())?;
    let wanted = functions(&header);
    if wanted.is_empty() {
        return Err("the header declares no function".into());
    }
    if found != wanted {
        let (more, less): (Vec<_>, Vec<_>) = (found.difference(&wanted).collect(), wanted.difference(&found).collect());
        return Err(format!("exported but not in the header: {more:?}; in the header but not exported: {less:?}"));
    }
    println!("{} functions exported, and nothing else", found.len());
    Ok(())
}

/// The functions that a header declares: names that begin with `attn_` and are followed by `(`, on lines of code.
fn functions(header: &str) -> BTreeSet<&str> {
    let code = header.lines().filter(|line| !line.trim_start().starts_with(['*', '/']) && !line.starts_with('#'));
    code.filter_map(|line| {
        let start = line.find("attn_")?;
        let (name, _) = line[start..].split_once('(')?;
        Some(name)
    })
    .collect()
}

/// Runs a command that must succeed.
pub(crate) fn succeed(command: &mut Command) -> Result<(), String> {
    let shown = format!("{command:?}");
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{shown}: {status}")),
        Err(error) => Err(format!("{shown}: {error}")),
    }
}

fn copy(from: &Path, to: &Path) -> Result<(), String> {
    fs::copy(from, to).map(|_| ()).map_err(|error| format!("{} to {}: {error}", from.display(), to.display()))
}

pub(crate) fn write(to: &Path, text: &str) -> Result<(), String> {
    fs::write(to, text).map_err(|error| format!("{}: {error}", to.display()))
}

const PKG_CONFIG: &str = "\
prefix=${pcfiledir}/../..
includedir=${prefix}/include
libdir=${prefix}/lib

Name: attn
Description: Exact attention on CPUs
Version: {version}
Cflags: -I${includedir}
Libs: -L${libdir} -lattn
Libs.private: {needs}
";

/// A package of its own: beside a shared library, `-lattn` takes the shared one, whatever `--static` adds.
const PKG_CONFIG_STATIC: &str = "\
prefix=${pcfiledir}/../..
includedir=${prefix}/include
libdir=${prefix}/lib

Name: attn-static
Description: Exact attention on CPUs, the static library
Version: {version}
Cflags: -I${includedir}
Libs: ${libdir}/libattn.a {needs}
";

const CMAKE: &str = "\
# find_package(attn) gives attn::attn (shared) and attn::attn_static.
get_filename_component(_attn_lib \"${CMAKE_CURRENT_LIST_DIR}/../..\" ABSOLUTE)
get_filename_component(_attn_prefix \"${_attn_lib}/..\" ABSOLUTE)
if(NOT TARGET attn::attn)
    add_library(attn::attn SHARED IMPORTED)
    set_target_properties(attn::attn PROPERTIES
        IMPORTED_LOCATION \"${_attn_lib}/libattn.so.{version}\"
        IMPORTED_SONAME \"libattn.so.{abi}\"
        INTERFACE_INCLUDE_DIRECTORIES \"${_attn_prefix}/include\")
    add_library(attn::attn_static STATIC IMPORTED)
    set_target_properties(attn::attn_static PROPERTIES
        IMPORTED_LOCATION \"${_attn_lib}/libattn.a\"
        INTERFACE_INCLUDE_DIRECTORIES \"${_attn_prefix}/include\"
        INTERFACE_LINK_LIBRARIES \"{needs}\")
endif()
";

const CMAKE_VERSION: &str = "\
set(PACKAGE_VERSION \"{version}\")
if(PACKAGE_FIND_VERSION VERSION_GREATER PACKAGE_VERSION)
    set(PACKAGE_VERSION_COMPATIBLE FALSE)
else()
    set(PACKAGE_VERSION_COMPATIBLE TRUE)
    if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
        set(PACKAGE_VERSION_EXACT TRUE)
    endif()
endif()
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_found_and_mentions_are_not() {
        let header = "// See attn_forward().\n * attn_last_error() says\nconst char *attn_version(void);\n\
                      enum AttnStatus attn_forward(const struct AttnOptions *options,\n    size_t attn_len);\n";
        assert_eq!(functions(header).into_iter().collect::<Vec<_>>(), ["attn_forward", "attn_version"]);
    }
}
