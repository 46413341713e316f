//! In a sandbox that forbids to take files out of other processes, as containers often do.
//!
//! # Safety
//! The filter is a program of five instructions in memory of ours, which the kernel copies.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what a test did not expect ends it, in its helpers too")]

#[path = "support/process.rs"]
mod process;
mod support;

use std::thread;

use cuvmm_ipc::{AllowedPeers, Limits, Listener, connect, receive, send};
use nix::errno::Errno;
use nix::libc;
use process::alone;
use support::{descriptor, inodes, soon};

/// These numbers are the same on every architecture.
const PIDFD_OPEN: libc::c_long = 434;
const PIDFD_GETFD: libc::c_long = 438;

/// Lets both calls fail with EPERM from now on, in this thread and those that it starts.
fn forbid_process_descriptors() {
    let instruction = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let equals = |number: libc::c_long, jt: u8, jf: u8| {
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, jt, jf, number as u32)
    };
    let answer = |value: u32| instruction(libc::BPF_RET | libc::BPF_K, 0, 0, value);
    let mut program = [
        // The number of the call is what the description of one begins with.
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        equals(PIDFD_OPEN, 1, 0),
        equals(PIDFD_GETFD, 0, 1),
        answer(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        answer(libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: takes no pointer.
    let alone = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(alone, 0, "{}", Errno::last());
    // SAFETY: the filter is a whole program, alive during the call.
    let set = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) };
    assert_eq!(set, 0, "{}", Errno::last());
}

#[test]
fn handles_pass_where_descriptors_of_processes_are_forbidden() {
    if alone("handles_pass_where_descriptors_of_processes_are_forbidden") {
        forbid_process_descriptors();
        for call in [PIDFD_OPEN, PIDFD_GETFD] {
            // SAFETY: numbers alone, and none of an open file.
            let answered = unsafe { libc::syscall(call, -1, -1, 0) };
            assert_eq!((answered, Errno::last()), (-1, Errno::EPERM));
        }
        let listener = Listener::private(AllowedPeers::default()).unwrap();
        let sent = descriptor(3);
        let received = thread::scope(|scope| {
            scope.spawn(|| send(listener.accept(soon()).unwrap().0, &sent, soon()).unwrap());
            let socket = connect(listener.path(), &AllowedPeers::default(), soon()).unwrap();
            receive(&socket, &Limits::default(), soon()).unwrap()
        });
        assert_eq!(inodes(&received), inodes(&sent));
    }
}
