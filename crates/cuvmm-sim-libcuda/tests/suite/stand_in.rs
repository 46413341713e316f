//! The library, and a process of its own for a test: the environment is read once, at the first call.
//!
//! # Safety
//! The library is the one that cargo built beside this test, which stands in for libcuda.
#![allow(unsafe_code)]

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use cuvmm_driver::{Driver, LoadError};
use libloading::os::unix::Library;

/// Names the part that a process plays.
const ROLE: &str = "CUVMM_TEST_ROLE";

/// The library's file: cargo builds it with the package that this test belongs to, and beside it.
pub(crate) fn path() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libcuvmm_sim_libcuda.so")
}

/// A folder with the library under the names that programs look for, removed at the end.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        let thread = std::thread::current().id();
        let folder =
            PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("stand-in-{}-{thread:?}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        for name in ["libcuda.so", "libcuda.so.1"] {
            std::os::unix::fs::symlink(path(), folder.join(name)).unwrap();
        }
        Self(folder)
    }

    pub(crate) fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

/// The library's driver, through our own loader.
pub(crate) fn load() -> Result<Driver, LoadError> {
    // SAFETY: the file is the stand-in.
    unsafe { Driver::load_from(path()) }
}

/// The library itself.
pub(crate) fn open() -> Library {
    // SAFETY: the file is the stand-in, which has no initialisers.
    unsafe { Library::new(path()) }.unwrap()
}

/// The role that this process plays, if it was started to play one.
pub(crate) fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Runs `test` once more, in a process of its own that plays `role` in that environment, and returns what it wrote.
pub(crate) fn play(test: &str, role: &str, environment: &[(&str, &str)], input: Stdio) -> Output {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .envs(environment.iter().copied())
        .stdin(input)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{test} as {role}: {said}{complained}");
    output
}

/// Runs the body in a process of its own, in that environment, and returns what that wrote to its standard error: this
/// same test, begun again there, where nothing is returned.
pub(crate) fn alone(test: &str, environment: &[(&str, &str)], body: impl FnOnce()) -> Option<String> {
    if role().is_some() {
        body();
        return None;
    }
    Some(String::from_utf8(play(test, "alone", environment, Stdio::null()).stderr).unwrap())
}
