//! Under the limits of a small process: few open files, and few handles on their way. Each test runs itself again in a
//! process of its own, whose limits it can set.
#![allow(clippy::unwrap_used, clippy::panic, reason = "what a test did not expect ends it, in its helpers too")]

#[path = "support/process.rs"]
mod process;
mod support;

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cuvmm_ipc::wire::Refusal;
use cuvmm_ipc::{AllowedPeers, Error, Limits, Listener, connect, receive, send};
use nix::errno::Errno;
use nix::sys::resource::{Resource, setrlimit};
use nix::unistd::{Uid, getuid, setresuid};
use process::alone;
use support::{descriptor, inodes, memory_file, pair, soon};

fn limit_open_files(limit: u64) {
    setrlimit(Resource::RLIMIT_NOFILE, limit, limit).unwrap();
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Sends to a receiver that can open `room` files more. Sender and receiver share the limit, as one process.
fn exchange(chunks: usize, room: usize) -> (Result<(), Error>, Error) {
    let (ours, theirs) = pair();
    let sent = descriptor(chunks);
    let before = open_files();
    limit_open_files((before + room) as u64);
    // Numbers below the limit may be free besides.
    let mut taken: Vec<_> = std::iter::from_fn(|| ours.try_clone().ok()).collect();
    taken.truncate(taken.len().saturating_sub(room));
    let (sent, received) = thread::scope(|scope| {
        let sender = scope.spawn(|| send(&ours, &sent, soon()));
        let received = receive(theirs, &Limits::default(), soon()).unwrap_err();
        (sender.join().unwrap(), received)
    });
    drop(taken);
    // The receiver's end is closed, and nothing that arrived stays.
    assert_eq!(open_files(), before - 1);
    (sent, received)
}

#[test]
fn a_receiver_at_the_limit_of_open_files_closes_what_it_got_and_says_so() {
    if alone("a_receiver_at_the_limit_of_open_files_closes_what_it_got_and_says_so") {
        let (sent, received) = exchange(100, 40);
        let at_the_limit = matches!(received, Error::OpenFiles { needed: 100, limit: 100.. });
        assert!(at_the_limit, "{received}");
        let refused = sent.unwrap_err();
        assert!(matches!(refused, Error::Refused { reason: Refusal::OPEN_FILES, .. }), "{refused}");
    }
}

#[test]
fn a_receiver_without_room_for_one_handle_says_so() {
    if alone("a_receiver_without_room_for_one_handle_says_so") {
        let (sent, received) = exchange(3, 0);
        assert!(matches!(received, Error::OpenFiles { needed: 3, .. }), "{received}");
        assert!(matches!(sent, Err(Error::Refused { reason: Refusal::OPEN_FILES, .. })));
    }
}

/// Nothing is lost: who came waits until there are fewer.
#[test]
fn a_server_without_open_files_to_spare_accepts_when_it_has_some() {
    if alone("a_server_without_open_files_to_spare_accepts_when_it_has_some") {
        let listener = Listener::private(AllowedPeers::default()).unwrap();
        let _client = connect(listener.path(), &AllowedPeers::default(), soon()).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, 3, 512).unwrap();
        for _ in 0..3 {
            let Err(Error::Os { operation, path, source }) = listener.accept(soon()) else { panic!("no room for it") };
            assert_eq!((operation, source.raw_os_error()), ("accept a connection", Some(24)));
            assert_eq!(path.as_deref(), Some(listener.path()));
        }
        setrlimit(Resource::RLIMIT_NOFILE, 512, 512).unwrap();
        listener.accept(soon()).unwrap();
    }
}

/// An unprivileged process may have as many handles on their way as it may have open files.
fn become_unprivileged() {
    if getuid().is_root() {
        let nobody = Uid::from_raw(65534);
        setresuid(nobody, nobody, nobody).unwrap();
    }
}

/// Fills sockets that nobody reads with handles, until no more may be on their way.
fn fill_the_air() -> Vec<(UnixStream, UnixStream)> {
    let file = memory_file();
    let mut sockets = Vec::new();
    loop {
        let (ours, theirs) = pair();
        for _ in 0..40 {
            if let Err(errno) = support::send_raw(&ours, &[0], &[file.as_fd(); 8]) {
                assert_eq!(errno, rustix::io::Errno::TOOMANYREFS);
                sockets.push((ours, theirs));
                return sockets;
            }
        }
        sockets.push((ours, theirs));
    }
}

/// One test: the handles on their way are counted for the user, and not for the process.
#[test]
fn a_sender_waits_until_fewer_handles_are_on_their_way_and_says_for_what_it_waited_in_vain() {
    if alone("a_sender_waits_until_fewer_handles_are_on_their_way_and_says_for_what_it_waited_in_vain") {
        limit_open_files(200);
        become_unprivileged();
        let air = fill_the_air();
        let (ours, _theirs) = pair();
        let error = send(&ours, &descriptor(5), Instant::now() + Duration::from_millis(50)).unwrap_err();
        let Error::Os { source, .. } = &error else { panic!("{error}") };
        assert_eq!(source.raw_os_error(), Some(Errno::ETOOMANYREFS as i32));

        let (ours, theirs) = pair();
        let sent = descriptor(5);
        let is_cleared = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(100));
                is_cleared.store(true, Ordering::SeqCst);
                drop(air);
            });
            scope.spawn(|| {
                send(&ours, &sent, soon()).unwrap();
                assert!(is_cleared.load(Ordering::SeqCst), "sent what there was no room for");
            });
            assert_eq!(inodes(&receive(&theirs, &Limits::default(), soon()).unwrap()), inodes(&sent));
        });
    }
}
