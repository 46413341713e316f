//! Handles are open files, and a process may have so many: what more is said to need, and what needs few. Each test runs
//! itself again in a process of its own, whose limit it can set.
#![allow(clippy::unwrap_used, clippy::panic, reason = "what a test did not expect ends it, in its helpers too")]

#[path = "support/process.rs"]
mod process;
#[path = "support/simulated.rs"]
mod simulated;
mod support;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread;

use cuvmm_ipc::wire::Refusal;
use cuvmm_ipc::{BufferDescriptor, Error, Limits, export, receive, receive_buffer, send, send_buffer};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use process::alone;
use simulated::{Bench, assert_reads, grown, write};
use support::{descriptor, memory_file, pair, soon};

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Allows as many open files as there are, and so many more.
fn allow_more(more: usize) {
    let limit = (open_files() + more) as u64;
    setrlimit(Resource::RLIMIT_NOFILE, limit, limit).unwrap();
}

/// Takes all open files but `room`, until what is returned is dropped.
fn leave_room(room: usize) -> Vec<OwnedFd> {
    let file = memory_file();
    let mut taken: Vec<_> = std::iter::from_fn(|| file.try_clone().ok()).collect();
    taken.truncate(taken.len() - room);
    taken
}

#[test]
fn more_handles_than_there_may_be_open_files_are_refused_before_any_is_made_or_sent() {
    if alone("more_handles_than_there_may_be_open_files_are_refused_before_any_is_made_or_sent") {
        let bench = Bench::small();
        let resource = bench.shareable();
        let buffer = grown(&resource, 100);
        let (ours, theirs) = pair();
        let sent = descriptor(150);
        let before = open_files();
        // What is open stays open under a limit that is lower.
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, 90, hard).unwrap();
        bench.simulator.clear_calls();
        let error = export(&buffer).unwrap_err();
        assert!(matches!(error, Error::OpenFiles { limit: 90, needed: 100 }), "{error}");
        assert_eq!(bench.simulator.calls(), []);

        thread::scope(|scope| {
            let sender = scope.spawn(|| send(&ours, &sent, soon()));
            let error = receive(&theirs, &Limits::default(), soon()).unwrap_err();
            assert!(matches!(error, Error::OpenFiles { limit: 90, needed: 150 }), "{error}");
            let refused = sender.join().unwrap().unwrap_err();
            assert!(matches!(refused, Error::Refused { reason: Refusal::OPEN_FILES, .. }), "{refused}");
        });
        setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
        assert_eq!(open_files(), before);
    }
}

#[test]
fn an_export_that_runs_out_of_open_files_closes_what_it_made_and_sending_the_buffer_needs_few() {
    if alone("an_export_that_runs_out_of_open_files_closes_what_it_made_and_sending_the_buffer_needs_few") {
        let bench = Bench::small();
        let resource = bench.shareable();
        let buffer = grown(&resource, 100);
        write(&buffer, 3);
        let (ours, theirs) = pair();
        // For both ends, which have up to 32 open at once each; too little for all of the buffer.
        let room = 80;
        allow_more(200);
        let taken = leave_room(room);
        let before = open_files();
        let error = export(&buffer).unwrap_err();
        assert!(matches!(error, Error::OpenFiles { limit: 200.., needed: 100 }), "{error}");
        assert_eq!(open_files(), before);
        let imported = thread::scope(|scope| {
            scope.spawn(|| send_buffer(&ours, &buffer, soon()).unwrap());
            receive_buffer(&theirs, &resource, &Limits::default(), soon()).unwrap()
        });
        assert_reads(&imported, 3);
        drop(taken);
    }
}

#[test]
fn handles_that_can_not_be_duplicated_for_want_of_open_files_are_closed() {
    if alone("handles_that_can_not_be_duplicated_for_want_of_open_files_are_closed") {
        let sent = descriptor(9);
        let shared: Vec<_> = (0..9).map(|_| Arc::new(memory_file())).collect();
        allow_more(20);
        let sizes = [4096; 9];
        let shares = || BufferDescriptor::from_fds(shared.iter().cloned(), &sizes, None).unwrap();
        let taken = leave_room(5);
        let before = open_files();
        let errors = [
            sent.try_clone().unwrap_err(),
            BufferDescriptor::from_fds(sent.fds(), &sizes, None).unwrap_err(),
            shares().into_parts().unwrap_err(),
        ];
        for error in errors {
            assert!(matches!(error, Error::OpenFiles { needed: 9, .. }), "{error}");
            assert_eq!(open_files(), before);
        }
        drop(taken);
    }
}
