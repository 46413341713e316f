//! The bundle of `cargo xtask gpu-test --bundle DIR`: stripped binaries that need no cargo.
//!
//! ```text
//! DIR/gpu-test       the runner, which runs every suite beside it
//! DIR/cuvmm          the command line
//! DIR/process-life   the program that a suite begins beside the folder that it stands in
//! DIR/share-with     shares with Python, where that has NVIDIA's bindings; it has interop/python/share.py in it
//! DIR/suites/NAME    the suites
//! DIR/examples/NAME  the examples that load the driver
//! DIR/benches/NAME   the benchmarks that load the driver, and that of our own cost
//! DIR/BUNDLE         says what the folder is and needs; an earlier bundle is known by its first line
//! DIR.tar.gz         all of that, packed to be carried
//! ```

use std::path::{Path, PathBuf};
use std::{fmt, fs};

use anyhow::{Context, Result, ensure};
use xshell::{Shell, cmd};

use crate::gpu_test::Binaries;

/// The most that a packed bundle may weigh, so that it can be carried to a machine by any means.
const LIMIT: u64 = 60 << 20;
const MARKER: &str = "BUNDLE";
/// The first line of the marker.
const MARKER_TITLE: &str = "The GPU suites of cuvmm.";
const MARKER_TEXT: &str = "\
./gpu-test runs them all and prints a table; it exits with 0 only when something passed and nothing
failed. ./cuvmm demo shows the library at work; ./cuvmm doctor says what works on the machine.
CUVMM_DRIVER=cuda benches/drop_cost --bench says what the drop of a buffer costs there, and benches/costs what buffers
cost beside the driver's calls alone; benches/own_cost --bench says what our own code costs.
./share-with python3 shares memory with a program in Python, both ways, where that has cuda-bindings.
";

/// A version of glibc, of two or three numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Glibc(Vec<u32>);

/// What was written.
#[derive(Debug, Default)]
pub(crate) struct Bundle {
    /// How many suites have something to ask a GPU.
    pub(crate) suites: usize,
    /// The size of all its binaries.
    pub(crate) bytes: u64,
    /// That of all, packed.
    pub(crate) packed: u64,
    /// The oldest glibc on which all of them run.
    pub(crate) glibc: Glibc,
}

impl fmt::Display for Glibc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.0.iter().map(u32::to_string).collect();
        f.write_str(&numbers.join("."))
    }
}

/// Where a bundle is packed: beside its folder.
pub(crate) fn archive(dir: &Path) -> PathBuf {
    let mut name = dir.as_os_str().to_owned();
    name.push(".tar.gz");
    name.into()
}

/// Refuses a folder that holds anything but an earlier bundle, and a file beside it that is not that bundle, packed.
pub(crate) fn check_target(dir: &Path) -> Result<()> {
    let archive = archive(dir);
    ensure!(is_bundle(dir) || !archive.try_exists()?, "there is a {} already: name another folder", archive.display());
    if !dir.try_exists()? {
        return Ok(());
    }
    let mut entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    ensure!(
        entries.next().is_none() || is_bundle(dir),
        "{} is neither empty nor an earlier bundle: name another folder",
        dir.display()
    );
    Ok(())
}

fn is_bundle(dir: &Path) -> bool {
    fs::read_to_string(dir.join(MARKER)).is_ok_and(|text| text.lines().next() == Some(MARKER_TITLE))
}

/// Writes the bundle.
pub(crate) fn write(sh: &Shell, dir: &Path, binaries: &Binaries) -> Result<Bundle> {
    check_target(dir)?;
    for stale in ["gpu-test", "cuvmm", "process-life", "share-with", "suites", "examples", "benches"] {
        sh.remove_path(dir.join(stale))?;
    }
    // The marker comes first: a bundle that is left half written can be written again.
    sh.write_file(dir.join(MARKER), format!("{MARKER_TITLE}\n"))?;
    let mut bundle = Bundle::default();
    bundle.add(sh, &binaries.runner, &dir.join("gpu-test"))?;
    bundle.add(sh, &binaries.cli, &dir.join("cuvmm"))?;
    bundle.add(sh, &binaries.process_life, &dir.join("process-life"))?;
    bundle.add(sh, &binaries.share_with, &dir.join("share-with"))?;
    for suite in &binaries.suites {
        // What a GPU is not asked need not be carried there.
        let path = &suite.path;
        if !has_ignored_tests(&cmd!(sh, "{path} --list --ignored").quiet().read()?) {
            continue;
        }
        bundle.suites += 1;
        bundle.add(sh, path, &dir.join("suites").join(&suite.name))?;
    }
    for example in &binaries.examples {
        bundle.add(sh, &example.path, &dir.join("examples").join(&example.name))?;
    }
    for bench in &binaries.benches {
        bundle.add(sh, &bench.path, &dir.join("benches").join(&bench.name))?;
    }
    let text = format!("{MARKER_TITLE}\n{MARKER_TEXT}It needs glibc {} or newer.\n", bundle.glibc);
    sh.write_file(dir.join(MARKER), text)?;
    let archive = archive(dir);
    cmd!(sh, "tar --create --gzip --file {archive} --directory {dir} .").quiet().run()?;
    bundle.packed = fs::metadata(archive)?.len();
    check_size(bundle.packed)?;
    Ok(bundle)
}

impl Bundle {
    /// Copies one binary, stripped.
    fn add(&mut self, sh: &Shell, from: &Path, to: &Path) -> Result<()> {
        if let Some(parent) = to.parent() {
            sh.create_dir(parent)?;
        }
        ensure!(!sh.path_exists(to), "two binaries are to be {}", to.display());
        fs::copy(from, to).with_context(|| format!("failed to copy to {}", to.display()))?;
        cmd!(sh, "strip --strip-all {to}").quiet().run()?;
        let headers = readelf(sh, &["--program-headers", "--dynamic"], to)?;
        check_linkage(&headers).with_context(|| format!("{} cannot be bundled", to.display()))?;
        let needed = glibc_needed(&readelf(sh, &["--version-info"], to)?);
        let needed = needed.with_context(|| format!("{} does not say which glibc it needs", to.display()))?;
        self.glibc = self.glibc.clone().max(needed);
        self.bytes += fs::metadata(to)?.len();
        Ok(())
    }
}

/// Whether a list of the ignored tests of a suite, which are those for a GPU, has any.
fn has_ignored_tests(list: &str) -> bool {
    list.lines().any(|line| line.ends_with(": test"))
}

/// What readelf says in English, whatever the language of the caller.
fn readelf(sh: &Shell, what: &[&str], file: &Path) -> Result<String> {
    Ok(cmd!(sh, "readelf --wide {what...} {file}").env("LC_ALL", "C").quiet().read()?)
}

/// The highest version of glibc among those that `readelf --version-info` lists.
fn glibc_needed(versions: &str) -> Option<Glibc> {
    let names = versions.split_whitespace().filter_map(|word| word.strip_prefix("GLIBC_"));
    let numbers = |name: &str| name.split('.').map(|number| number.parse().ok()).collect::<Option<_>>();
    names.filter_map(numbers).map(Glibc).max()
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
    ensure!(bytes <= LIMIT, "the bundle is {} when it is packed, and may be {}", mebibytes(bytes), mebibytes(LIMIT));
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
    fn glibc_versions() {
        let check = |versions: &str, expect: Option<&str>| {
            assert_eq!(glibc_needed(versions).map(|version| version.to_string()).as_deref(), expect, "{versions}");
        };
        check("", None);
        check("0x0010: Name: GCC_3.3  Flags: none  Version: 2", None);
        check("0x0020: Name: GLIBC_2.9  Flags: none\n0x0030: Name: GLIBC_2.34  Flags: none\n", Some("2.34"));
        check("Name: GLIBC_2.2.5  Flags: none\nName: GLIBC_PRIVATE\n", Some("2.2.5"));
    }

    #[test]
    fn a_suite_without_tests_for_a_gpu_is_known() {
        assert!(has_ignored_tests("gpu::grows: test\n\n1 test, 0 benchmarks\n"));
        assert!(!has_ignored_tests("\n0 tests, 0 benchmarks\n"));
    }

    #[test]
    fn sizes() {
        assert!(check_size(LIMIT).is_ok());
        let error = check_size(LIMIT + 1).unwrap_err();
        assert_eq!(error.to_string(), "the bundle is 60.1 MiB when it is packed, and may be 60.0 MiB");
    }

    #[test]
    fn only_an_earlier_bundle_is_overwritten() {
        let sh = Shell::new().unwrap();
        let dir = sh.create_temp_dir().unwrap();
        assert!(check_target(&dir.path().join("absent")).is_ok());
        assert!(check_target(dir.path()).is_ok(), "an empty folder");
        fs::write(dir.path().join("thesis.tex"), "").unwrap();
        assert!(check_target(dir.path()).is_err(), "somebody's work");
        fs::write(dir.path().join(MARKER), "of leaflets\n").unwrap();
        assert!(check_target(dir.path()).is_err(), "somebody's file of that name");
        fs::write(dir.path().join(MARKER), format!("{MARKER_TITLE}\n{MARKER_TEXT}")).unwrap();
        assert!(check_target(dir.path()).is_ok(), "a bundle");
        let (bundle, other) = (dir.path().join("bundle"), dir.path().join("other"));
        fs::create_dir(&bundle).unwrap();
        fs::write(bundle.join(MARKER), format!("{MARKER_TITLE}\n")).unwrap();
        for folder in [&bundle, &other] {
            fs::write(archive(folder), "").unwrap();
        }
        assert!(check_target(&bundle).is_ok(), "a bundle and that bundle, packed");
        assert!(check_target(&other).is_err(), "somebody's archive of that name");
    }
}
