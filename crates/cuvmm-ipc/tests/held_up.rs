//! Peers that would keep a process waiting: by files whose closing takes long, and by sockets that take nothing.
#![allow(clippy::unwrap_used, clippy::panic, reason = "what a test did not expect ends it, in its helpers too")]

#[path = "support/simulated.rs"]
mod simulated;
mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use cuvmm_ipc::wire::{self, Refusal, Reply};
use cuvmm_ipc::{
    AllowedPeers, BufferDescriptor, Error, Limits, Listener, Metadata, import, receive, receive_buffer, send,
};
use rustix::io::Errno;
use rustix::net::{SendFlags, sockopt};
use simulated::Bench;
use support::{OpenFiles, descriptor, pair, send_raw, send_raw_with, soon};

/// How long closing the socket takes.
const LINGER: Duration = Duration::from_secs(8);
/// What no exchange here may take, with its deadline of 200 milliseconds.
const IN_TIME: Duration = Duration::from_secs(4);

fn in_a_moment() -> Instant {
    Instant::now() + Duration::from_millis(200)
}

/// A socket with unsent data, and the end that never reads it.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (server, _) = listener.accept().unwrap();
    client.set_nonblocking(true).unwrap();
    while client.write(&[0; 65536]).is_ok() {}
    client.set_nonblocking(false).unwrap();
    sockopt::set_socket_linger(&client, Some(LINGER)).unwrap();
    (client.into(), server)
}

/// Sends a lingering socket as the handle of one chunk, and keeps no descriptor of it.
fn sent_as_a_handle(bytes: usize) -> (UnixStream, UnixStream, TcpStream) {
    let (ours, theirs) = pair();
    let (socket, reader) = lingering();
    send_raw(&theirs, &wire::encode(&Metadata::new(vec![bytes])).unwrap(), &[]).unwrap();
    send_raw(&theirs, &wire::encode_handles(1), &[socket.as_fd()]).unwrap();
    (ours, theirs, reader)
}

#[track_caller]
fn require_in_time(since: Instant) {
    assert!(since.elapsed() < IN_TIME, "{:?}", since.elapsed());
}

#[test]
fn a_socket_that_lingers_holds_no_receiver_up() {
    let _files = OpenFiles::watch();
    let bench = Bench::small();
    let resource = bench.shareable();
    let bytes = resource.granularity().bytes();

    // Refused as no handle, at once and later.
    let (ours, _theirs, _reader) = sent_as_a_handle(bytes);
    let since = Instant::now();
    let error = receive_buffer(&ours, &resource, &Limits::default(), in_a_moment()).unwrap_err();
    assert!(matches!(error, Error::WrongFile { chunk: 0, .. }), "{error}");
    require_in_time(since);

    let (ours, _theirs, _reader) = sent_as_a_handle(bytes);
    let received = receive(&ours, &Limits::default(), in_a_moment()).unwrap();
    let since = Instant::now();
    assert!(matches!(import(&resource, received), Err(Error::WrongFile { chunk: 0, .. })));
    require_in_time(since);

    // Never looked at.
    let (ours, _theirs, _reader) = sent_as_a_handle(bytes);
    let received = receive(&ours, &Limits::default(), in_a_moment()).unwrap();
    let since = Instant::now();
    drop(received);
    require_in_time(since);

    // Where no handle belongs, and where more are due.
    for chunks in [1, 2] {
        let (ours, theirs) = pair();
        let (socket, _reader) = lingering();
        let header = wire::encode(&Metadata::new(vec![bytes; chunks])).unwrap();
        if chunks == 1 {
            send_raw(&theirs, &header, &[socket.as_fd()]).unwrap();
        } else {
            send_raw(&theirs, &header, &[]).unwrap();
            send_raw(&theirs, &wire::encode_handles(1), &[socket.as_fd()]).unwrap();
        }
        drop(socket);
        let since = Instant::now();
        let error = receive(&ours, &Limits::default(), in_a_moment()).unwrap_err();
        assert!(matches!(error, Error::UnexpectedHandles { .. } | Error::Timeout { .. }), "{error}");
        require_in_time(since);
    }
}

#[test]
fn a_socket_that_lingers_holds_no_sender_up() {
    let _files = OpenFiles::watch();
    let (ours, theirs) = pair();
    let (socket, _reader) = lingering();
    let reply = Reply::Refused { reason: Refusal::OTHER, detail: 0 };
    send_raw(&theirs, &reply.encode(), &[socket.as_fd()]).unwrap();
    drop(socket);
    let sent = descriptor(1);
    let since = Instant::now();
    let error = send(&ours, &sent, in_a_moment()).unwrap_err();
    assert!(matches!(error, Error::UnexpectedHandles { announced: 0, received: 1 }), "{error}");
    require_in_time(since);
}

/// What came over a connection before anybody knew who it was goes with it, unread.
#[test]
fn what_a_denied_peer_sent_holds_no_listener_up() {
    let _files = OpenFiles::watch();
    let listener = Listener::private(AllowedPeers::default().uid(u32::MAX - 1)).unwrap();
    let client = UnixStream::connect(listener.path()).unwrap();
    let (socket, _reader) = lingering();
    send_raw(&client, b"!", &[socket.as_fd()]).unwrap();
    drop(socket);
    let since = Instant::now();
    let denied = listener.accept(in_a_moment());
    assert!(matches!(denied, Err(Error::PeerDenied { .. })), "{denied:?}");
    require_in_time(since);
}

/// A byte out of band is passed over by the kernel, and what came with it closed in the midst of our call.
#[test]
fn a_socket_that_lingers_out_of_band_holds_nobody_up() {
    let _files = OpenFiles::watch();
    for ahead in [&[][..], &wire::MAGIC] {
        let (ours, theirs) = pair();
        let (socket, _reader) = lingering();
        if !ahead.is_empty() {
            send_raw(&theirs, ahead, &[]).unwrap();
        }
        match send_raw_with(&theirs, b"!", &[socket.as_fd()], SendFlags::OOB) {
            // A kernel without it has nothing to pass over.
            Err(Errno::OPNOTSUPP) => return,
            sent => sent.unwrap(),
        }
        drop(socket);
        let since = Instant::now();
        let error = receive(&ours, &Limits::default(), in_a_moment()).unwrap_err();
        assert!(matches!(error, Error::UnexpectedHandles { announced: 0, received: 1 }), "{error}");
        require_in_time(since);
    }
}

/// A socket of the kernel's smallest buffer, and its peer.
fn narrow() -> (UnixStream, UnixStream) {
    let (ours, theirs) = pair();
    sockopt::set_socket_send_buffer_size(&ours, 1).unwrap();
    (ours, theirs)
}

#[test]
fn a_refusal_is_heard_while_the_receiver_takes_nothing_more() {
    let files = OpenFiles::watch();
    let (ours, mut theirs) = narrow();
    // More sizes than the buffer takes.
    support::raise_open_files();
    let sent = descriptor(2000);
    thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let since = Instant::now();
            (send(&ours, &sent, soon()).unwrap_err(), since.elapsed())
        });
        theirs.read_exact(&mut [0; 96]).unwrap();
        theirs.write_all(&Reply::Refused { reason: Refusal::TOO_MANY_BYTES, detail: 7 }.encode()).unwrap();
        let (error, took) = sender.join().unwrap();
        assert!(matches!(error, Error::Refused { reason: Refusal::TOO_MANY_BYTES, detail: 7 }), "{error}");
        assert!(took < Duration::from_secs(10), "{took:?}");
    });
    drop((ours, theirs, sent));
    files.assert_unchanged();
}

#[test]
fn a_sender_hears_that_all_was_accepted_also_when_it_reads_late() {
    let files = OpenFiles::watch();
    let (ours, mut theirs) = narrow();
    // What the receiver said before, and nobody has read yet.
    ours.set_nonblocking(true).unwrap();
    let mut earlier = 0;
    while let Ok(written) = (&ours).write(&[7; 100]) {
        earlier += written;
    }
    send_raw(&theirs, &wire::encode(&Metadata::new(vec![4096])).unwrap(), &[]).unwrap();
    send_raw(&theirs, &wire::encode_handles(1), &[support::memory_file().as_fd()]).unwrap();
    let received: BufferDescriptor = thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(100));
            theirs.read_exact(&mut vec![0; earlier]).unwrap();
            let mut reply = [0; wire::REPLY_LENGTH];
            theirs.read_exact(&mut reply).unwrap();
            assert_eq!(Reply::decode(&reply), Ok(Reply::Accepted));
        });
        receive(&ours, &Limits::default(), soon()).unwrap()
    });
    assert_eq!(received.fds().len(), 1);
    // One who never reads it is told nothing, and nothing is kept.
    while (&ours).write(&[7; 100]).is_ok() {}
    send_raw(&theirs, &wire::encode(&Metadata::new(vec![4096])).unwrap(), &[]).unwrap();
    send_raw(&theirs, &wire::encode_handles(1), &[support::memory_file().as_fd()]).unwrap();
    assert!(matches!(receive(&ours, &Limits::default(), in_a_moment()), Err(Error::Timeout { .. })));
    drop((ours, theirs, received));
    files.assert_unchanged();
}

#[test]
fn credentials_and_handles_come_in_one_message() {
    let files = OpenFiles::watch();
    let (ours, theirs) = pair();
    for socket in [&ours, &theirs] {
        sockopt::set_socket_passcred(socket, true).unwrap();
    }
    for chunks in [1, 300] {
        let sent = descriptor(chunks);
        thread::scope(|scope| {
            scope.spawn(|| send(&ours, &sent, soon()).unwrap());
            let received = receive(&theirs, &Limits::default(), soon()).unwrap();
            assert_eq!(support::inodes(&received), support::inodes(&sent));
        });
    }
    drop((ours, theirs));
    files.assert_unchanged();
}

mod pidfds {
    use nix::libc;
    use nix::sys::socket::SetSockOpt;
    use nix::sys::socket::sockopt::SetBool;

    /// `SO_PASSPIDFD`.
    const NUMBER: libc::c_int = 76;

    #[derive(Clone, Copy)]
    struct PassPidfd;

    nix::setsockopt_impl!(PassPidfd, libc::SOL_SOCKET, NUMBER, bool, SetBool);

    /// Whether the kernel has the option, which is on then.
    pub(crate) fn turn_on(socket: &std::os::unix::net::UnixStream) -> bool {
        match PassPidfd.set(&socket, &true) {
            Ok(()) => true,
            Err(errno) => {
                assert_eq!(errno, nix::errno::Errno::ENOPROTOOPT);
                false
            }
        }
    }
}

#[test]
fn a_socket_that_passes_pidfds_is_refused_where_there_are_any() {
    let files = OpenFiles::watch();
    let (ours, theirs) = pair();
    let has_pidfds = pidfds::turn_on(&ours);
    thread::scope(|scope| {
        let sender = scope.spawn(|| send(&theirs, &descriptor(1), in_a_moment()));
        let received = receive(&ours, &Limits::default(), in_a_moment());
        assert_eq!(matches!(received, Err(Error::PassesPidfds)), has_pidfds);
        assert_eq!(sender.join().unwrap().is_err(), has_pidfds);
    });
    assert_eq!(matches!(send(&ours, &descriptor(0), in_a_moment()), Err(Error::PassesPidfds)), has_pidfds);
    drop((ours, theirs));
    files.assert_unchanged();
}
