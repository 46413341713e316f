//! In a sandbox that forbids to take files out of other processes, as containers often do, or to open any.
//!
//! # Safety
//! The filter is a program in memory of ours, which the kernel copies.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what a test did not expect ends it, in its helpers too")]

#[path = "support/process.rs"]
mod process;
mod support;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::thread;

use cuvmm_ipc::wire::Refusal;
use cuvmm_ipc::{AllowedPeers, Error, Limits, Listener, connect, receive, send};
use nix::errno::Errno;
use nix::libc;
use nix::sys::resource::{Resource, setrlimit};
use process::alone;
use rustix::io::fcntl_getfd;
use support::{descriptor, inodes, memory_file, pair, soon};

/// These numbers are the same on every architecture.
const PIDFD_OPEN: libc::c_long = 434;
const PIDFD_GETFD: libc::c_long = 438;

const OPENING: &[libc::c_long] = &[
    libc::SYS_openat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
];

/// Lets these calls fail with EPERM from now on, in this thread and those that it starts.
fn forbid(calls: &[libc::c_long]) {
    let instruction = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let answer = |value: u32| instruction(libc::BPF_RET | libc::BPF_K, 0, 0, value);
    // The number of the call is what the description of one begins with.
    let mut program = vec![instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0)];
    for call in calls {
        program.push(instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, *call as u32));
        program.push(answer(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32));
    }
    program.push(answer(libc::SECCOMP_RET_ALLOW));
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
        forbid(&[PIDFD_OPEN, PIDFD_GETFD]);
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

/// How many of these numbers are open files, found out without opening any.
fn open_among(numbers: std::ops::Range<i32>) -> usize {
    // SAFETY: a number that is no open file is only asked about.
    numbers.filter(|number| fcntl_getfd(unsafe { BorrowedFd::borrow_raw(*number) }).is_ok()).count()
}

/// The kernel leaves out what there is no room for. Where it can't be found out that this is why, it is told as it is.
#[test]
fn handles_that_the_kernel_kept_back_are_told_from_those_that_the_peer_did_not_send() {
    if alone("handles_that_the_kernel_kept_back_are_told_from_those_that_the_peer_did_not_send") {
        const LIMIT: i32 = 100;
        let ((ours, theirs), sent) = (pair(), descriptor(10));
        setrlimit(Resource::RLIMIT_NOFILE, LIMIT as u64, LIMIT as u64).unwrap();
        let file = memory_file();
        let mut taken: Vec<OwnedFd> = std::iter::from_fn(|| file.try_clone().ok()).collect();
        taken.truncate(taken.len() - 4);
        let before = open_among(0..LIMIT);
        forbid(OPENING);
        assert!(std::fs::File::open("/").is_err());
        thread::scope(|scope| {
            let sender = scope.spawn(|| send(&ours, &sent, soon()));
            let error = receive(&theirs, &Limits::default(), soon()).unwrap_err();
            assert!(matches!(error, Error::TruncatedHandles { announced: 10, received: 4 }), "{error}");
            let refused = sender.join().unwrap().unwrap_err();
            assert!(matches!(refused, Error::Refused { reason: Refusal::HANDLES, detail: 0 }), "{refused}");
        });
        assert_eq!(open_among(0..LIMIT), before, "those that arrived are closed");
    }
}
