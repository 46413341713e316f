//! Processes end in silence and with code 0, whatever the library still has then. What they have, and how they end, is the
//! program's `process-life`.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::PathBuf;
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use cuvmm_tests::{Backend, Kind};

cuvmm_tests::suite!(
    a_process_ends_quietly_with_entries_pending,
    a_process_ends_quietly_while_the_reaper_is_busy,
    a_process_ends_quietly_with_a_buffer_half_gone,
    a_process_ends_quietly_with_buffers_in_thread_locals,
    a_process_ends_quietly_when_buffers_of_other_threads_went,
    a_process_ends_quietly_with_buffers_in_statics,
    a_process_ends_quietly_with_graphs_that_hold_memory,
    a_process_ends_quietly_with_a_fork_behind_it,
    a_process_ends_within_seconds_when_the_reaper_hangs_in_a_call,
    a_process_may_end_on_the_reapers_thread,
    a_thread_may_end_after_the_reaper,
    a_buffer_may_be_dropped_after_the_drivers_end,
    a_forked_child_has_a_reaper_of_its_own,
    a_child_that_the_reaper_forked_is_no_reaper,
    what_is_left_while_no_thread_can_be_started_goes_later,
);

/// A real driver is not asked to end while one of its own threads waits for that.
mod simulated {
    use cuvmm_tests::{Backend, Kind};

    #[test]
    fn a_process_may_end_in_a_host_function() {
        for kind in [Kind::Strict, Kind::Measured] {
            let backend = Backend::open(kind, "");
            super::require_quiet_end(&backend, "a-host-function-exits", 20);
        }
    }

    #[test]
    fn a_process_may_end_on_three_threads_at_once() {
        for kind in [Kind::Strict, Kind::Measured] {
            let backend = Backend::open(kind, "");
            super::require_quiet_end(&backend, "the-reaper-exits-too", 8);
        }
    }
}

const ENDS: [&str; 3] = ["return", "exit", "exit-elsewhere"];

/// How many processes end in each way with each load: 1,152 in all on the simulator, 72 on a GPU.
fn rounds(backend: &Backend) -> usize {
    if backend.is_gpu() { 3 } else { 24 }
}

/// How many there are at a time.
const AT_ONCE: usize = 4;

/// The program, which stands beside the folder of this one wherever that is.
fn program() -> PathBuf {
    let this = std::env::current_exe().unwrap();
    this.parent().unwrap().parent().unwrap().join("process-life")
}

fn run(backend: &Backend, load: &str, end: &str) -> Output {
    let backend = match backend.kind {
        Kind::Strict => "strict",
        Kind::Measured => "measured",
        Kind::Gpu => "gpu",
        _ => unreachable!("one device is enough"),
    };
    let program = program();
    let output = Command::new(&program).args([backend, load, end]).env("RUST_BACKTRACE", "0").output();
    output.unwrap_or_else(|error| panic!("{}: {error}", program.display()))
}

/// Demands that a process got to its end, and ended well.
fn require_quiet(output: &Output, what: &str) {
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert_eq!((output.status.code(), &*stdout, &*stderr), (Some(0), "ready\n", ""), "{what}: {}", output.status);
}

/// Begins `count` processes with that load and end, some at a time.
fn require_quiet_ends(backend: &Backend, load: &str, end: &str, count: usize) {
    thread::scope(|scope| {
        for first in 0..AT_ONCE {
            scope.spawn(move || {
                for _ in (first..count).step_by(AT_ONCE) {
                    require_quiet(&run(backend, load, end), &format!("{load}, {end}"));
                }
            });
        }
    });
}

fn require_each_end(backend: &Backend, load: &str) {
    for end in ENDS {
        require_quiet_ends(backend, load, end, rounds(backend));
    }
}

/// Begins processes that end by what they do.
fn require_quiet_end(backend: &Backend, load: &str, count: usize) {
    require_quiet_ends(backend, load, "itself", count);
}

fn a_process_ends_quietly_with_entries_pending(backend: &Backend) {
    require_each_end(backend, "entries");
}

fn a_process_ends_quietly_while_the_reaper_is_busy(backend: &Backend) {
    require_each_end(backend, "busy");
}

fn a_process_ends_quietly_with_a_buffer_half_gone(backend: &Backend) {
    require_each_end(backend, "half");
}

fn a_process_ends_quietly_with_buffers_in_thread_locals(backend: &Backend) {
    require_each_end(backend, "thread-locals");
}

fn a_process_ends_quietly_when_buffers_of_other_threads_went(backend: &Backend) {
    require_each_end(backend, "threads");
}

fn a_process_ends_quietly_with_buffers_in_statics(backend: &Backend) {
    require_each_end(backend, "statics");
}

fn a_process_ends_quietly_with_graphs_that_hold_memory(backend: &Backend) {
    require_each_end(backend, "graphs");
}

fn a_process_ends_quietly_with_a_fork_behind_it(backend: &Backend) {
    require_each_end(backend, "forks");
}

fn a_process_ends_within_seconds_when_the_reaper_hangs_in_a_call(backend: &Backend) {
    let start = Instant::now();
    require_quiet_end(backend, "a-call-hangs", 1);
    let took = start.elapsed();
    // The call hangs for a minute, and is waited for for a second.
    assert!(took >= Duration::from_secs(1), "the call was not waited for: {took:?}");
    assert!(took < Duration::from_secs(20), "it took {took:?}");
}

fn a_process_may_end_on_the_reapers_thread(backend: &Backend) {
    let took = [(); 4].map(|()| {
        let start = Instant::now();
        require_quiet_end(backend, "the-reaper-exits", 1);
        start.elapsed()
    });
    // What it waits for others for, where that may be in vain.
    let in_vain = Duration::from_secs(1);
    assert!(backend.is_gpu() || took.iter().any(|took| *took < in_vain), "the reaper waits for itself: {took:?}");
}

fn a_thread_may_end_after_the_reaper(backend: &Backend) {
    require_quiet_end(backend, "a-thread-ends-late", 4);
}

fn a_buffer_may_be_dropped_after_the_drivers_end(backend: &Backend) {
    require_quiet_end(backend, "dropped-late", 4);
}

fn a_forked_child_has_a_reaper_of_its_own(backend: &Backend) {
    require_quiet_end(backend, "a-child-has-its-own", 4);
}

fn a_child_that_the_reaper_forked_is_no_reaper(backend: &Backend) {
    require_quiet_end(backend, "the-reaper-forks", 4);
}

fn what_is_left_while_no_thread_can_be_started_goes_later(backend: &Backend) {
    require_quiet_end(backend, "no-thread", 1);
}
