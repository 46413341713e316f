//! `cargo xtask tsan`: run the tests of what threads share under ThreadSanitizer, which watches for data races.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use xshell::{Shell, cmd};

/// The layers whose values threads share; their tests run on the simulator, whose own threads are watched with them.
const PACKAGES: &[&str] = &["cuvmm-handles", "cuvmm-resource"];
/// The standard library is built anew, so that its own synchronization is seen; what it depends on is fetched the first
/// time.
const FOLDER: &str = "target/tsan";
/// What is not reported, with the reasons.
const SUPPRESSIONS: &str = "xtask/tsan.supp";

pub(crate) fn run(sh: &Shell) -> Result<()> {
    let host = require_nightly(sh)?;
    let suppressions = sh.current_dir().join(SUPPRESSIONS);
    let packages = PACKAGES.iter().flat_map(|package| ["--package", package]);
    let tests = ["--tests", "--no-fail-fast", "--locked", "--target-dir", FOLDER];
    cmd!(sh, "rustup run nightly cargo test -Zbuild-std --target {host} {packages...} {tests...}")
        .env("RUSTFLAGS", "-Zsanitizer=thread")
        // Names and lines for its reports, and less to build.
        .env("CARGO_PROFILE_DEV_DEBUG", "line-tables-only")
        // Tests fork children that have threads of their own.
        .env("TSAN_OPTIONS", format!("die_after_fork=0 suppressions={}", suppressions.display()))
        .run()?;
    Ok(())
}

/// The target of the nightly toolchain, with what building the standard library takes.
fn require_nightly(sh: &Shell) -> Result<String> {
    let install = "`rustup toolchain install nightly --component rust-src`";
    let about = cmd!(sh, "rustup run nightly rustc --version --verbose").quiet().ignore_stderr().read();
    let about =
        about.with_context(|| format!("ThreadSanitizer needs a nightly toolchain, and none is here: {install}"))?;
    let host = about.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc does not say its host")?;
    let root = cmd!(sh, "rustup run nightly rustc --print sysroot").quiet().read()?;
    let has_source = Path::new(&root).join("lib/rustlib/src/rust/library/std").is_dir();
    ensure!(has_source, "the nightly toolchain here lacks the standard library's source: {install}");
    Ok(host.to_owned())
}
