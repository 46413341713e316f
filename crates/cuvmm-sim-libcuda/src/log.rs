//! What is written when the process ends: the violations, and what is still alive.
//!
//! # Safety
//! The handler is a function of this library, which is never unloaded, and panics nowhere.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::OnceLock;

use crate::library;

/// Where it goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Stderr,
    /// To the end of a file.
    File(PathBuf),
}

/// Set with the handler.
static TARGET: OnceLock<(Target, u32)> = OnceLock::new();

/// Writes one line to the standard error.
pub(crate) fn say(text: &str) {
    // Nothing is to be done where nobody reads it.
    let _ = std::io::stderr().write_all(format!("cuvmm-sim: {text}\n").as_bytes());
}

/// Has the log written when this process exits: not when it is killed, and not by its forked children.
pub(crate) fn write_at_exit(target: Target) {
    unsafe extern "C" {
        fn atexit(handler: extern "C" fn()) -> c_int;
    }
    if TARGET.set((target, std::process::id())).is_ok() {
        // SAFETY: the handler can be called until the process is gone.
        let failed = unsafe { atexit(write) } != 0;
        if failed {
            say("no log will be written: the C library takes no more handlers");
        }
    }
}

extern "C" fn write() {
    let Some((target, process)) = TARGET.get() else { return };
    if *process != std::process::id() {
        return;
    }
    let text = text(*process);
    let written = match target {
        Target::Stderr => std::io::stderr().write_all(text.as_bytes()),
        Target::File(path) => std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .and_then(|mut file| file.write_all(text.as_bytes())),
    };
    if let Err(error) = written {
        say(&format!("the log could not be written: {error}"));
    }
}

fn text(process: u32) -> String {
    let simulator = library::driver();
    let violations = simulator.violations();
    let mut text = String::new();
    for violation in &violations {
        let _ = writeln!(text, "cuvmm-sim[{process}]: violation: {violation}");
    }
    let _ = writeln!(text, "cuvmm-sim[{process}]: {} violations; alive: {:?}", violations.len(), simulator.live());
    text
}
