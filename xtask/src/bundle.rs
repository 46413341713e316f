//! The bundle of `cargo xtask gpu-test --bundle DIR`: stripped binaries that need no cargo.
//!
//! ```text
//! DIR/gpu-test       the runner, which runs every suite beside it
//! DIR/cuvmm          the command line
//! DIR/suites/NAME    the suites
//! DIR/examples/NAME  the examples of the crate cuvmm
//! DIR/BUNDLE         says what the folder is; an earlier bundle is known by it
//! ```

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use xshell::{Shell, cmd};

use crate::gpu_test::Binaries;

/// The most that a bundle may weigh, so that it can be carried to a machine by any means.
const LIMIT: u64 = 40 << 20;
const MARKER: &str = "BUNDLE";
const MARKER_TEXT: &str = "\
The GPU suites of cuvmm. ./gpu-test runs them all and prints a table; it exits with 0 only when
something passed and nothing failed. ./cuvmm demo shows the library at work.
";

/// Refuses a folder that holds anything but an earlier bundle.
pub(crate) fn check_target(dir: &Path) -> Result<()> {
    if !dir.try_exists()? {
        return Ok(());
    }
    let mut entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    ensure!(
        entries.next().is_none() || dir.join(MARKER).is_file(),
        "{} is neither empty nor an earlier bundle: name another folder",
        dir.display()
    );
    Ok(())
}

/// Writes the bundle and returns its size in bytes.
pub(crate) fn write(sh: &Shell, dir: &Path, binaries: &Binaries) -> Result<u64> {
    check_target(dir)?;
    for stale in ["gpu-test", "cuvmm", "suites", "examples"] {
        sh.remove_path(dir.join(stale))?;
    }
    // The marker comes first: a bundle that is left half written can be written again.
    sh.write_file(dir.join(MARKER), MARKER_TEXT)?;
    let mut bytes = 0;
    bytes += add(sh, &binaries.runner, &dir.join("gpu-test"))?;
    bytes += add(sh, &binaries.cli, &dir.join("cuvmm"))?;
    for suite in &binaries.suites {
        bytes += add(sh, &suite.path, &dir.join("suites").join(&suite.name))?;
    }
    for example in &binaries.examples {
        bytes += add(sh, &example.path, &dir.join("examples").join(&example.name))?;
    }
    check_size(bytes)?;
    Ok(bytes)
}

/// Copies one binary, stripped, and returns its size.
fn add(sh: &Shell, from: &Path, to: &Path) -> Result<u64> {
    if let Some(parent) = to.parent() {
        sh.create_dir(parent)?;
    }
    fs::copy(from, to).with_context(|| format!("failed to copy to {}", to.display()))?;
    cmd!(sh, "strip --strip-all {to}").quiet().run()?;
    let headers = cmd!(sh, "readelf --wide --program-headers --dynamic {to}").quiet().read()?;
    check_linkage(&headers).with_context(|| format!("{} cannot be bundled", to.display()))?;
    Ok(fs::metadata(to)?.len())
}

/// Checks what `readelf` says: the dynamic loader of glibc, and no CUDA library.
fn check_linkage(headers: &str) -> Result<()> {
    ensure!(
        headers.contains("program interpreter: /lib") && headers.contains("ld-linux"),
        "it does not ask for the dynamic loader of glibc"
    );
    let cuda = headers.lines().find(|line| line.contains("(NEEDED)") && line.contains("libcuda"));
    ensure!(cuda.is_none(), "it links the CUDA driver, which is to be loaded at run time");
    Ok(())
}

fn check_size(bytes: u64) -> Result<()> {
    ensure!(bytes <= LIMIT, "the bundle is {} in all, and may be {}", mebibytes(bytes), mebibytes(LIMIT));
    Ok(())
}

/// Bytes as text, rounded up to a tenth of a MiB.
pub(crate) fn mebibytes(bytes: u64) -> String {
    let tenths = (bytes * 10).div_ceil(1 << 20);
    format!("{}.{} MiB", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GLIBC: &str = "[Requesting program interpreter: /lib64/ld-linux-x86-64.so.2]\n\
        0x1 (NEEDED) Shared library: [libc.so.6]\n";

    #[test]
    fn linkage() {
        let check = |headers: &str, expect: Option<&str>| {
            let error = check_linkage(headers).err().map(|error| error.to_string());
            assert_eq!(error.as_deref(), expect, "{headers}");
        };
        check(GLIBC, None);
        check("", Some("it does not ask for the dynamic loader of glibc"));
        check(
            "[Requesting program interpreter: /lib/ld-musl-x86_64.so.1]",
            Some("it does not ask for the dynamic loader of glibc"),
        );
        check(
            &format!("{GLIBC}0x1 (NEEDED) Shared library: [libcuda.so.1]\n"),
            Some("it links the CUDA driver, which is to be loaded at run time"),
        );
    }

    #[test]
    fn sizes() {
        assert!(check_size(LIMIT).is_ok());
        let error = check_size(LIMIT + 1).unwrap_err();
        assert_eq!(error.to_string(), "the bundle is 40.1 MiB in all, and may be 40.0 MiB");
    }

    #[test]
    fn only_an_earlier_bundle_is_overwritten() {
        let sh = Shell::new().unwrap();
        let dir = sh.create_temp_dir().unwrap();
        assert!(check_target(&dir.path().join("absent")).is_ok());
        assert!(check_target(dir.path()).is_ok(), "an empty folder");
        fs::write(dir.path().join("thesis.tex"), "").unwrap();
        assert!(check_target(dir.path()).is_err(), "somebody's work");
        fs::write(dir.path().join(MARKER), MARKER_TEXT).unwrap();
        assert!(check_target(dir.path()).is_ok(), "a bundle");
    }
}
