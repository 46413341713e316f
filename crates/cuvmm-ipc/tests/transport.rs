//! Descriptors over Unix sockets: any number of handles arrives in order, whatever a peer does ends with a typed error
//! in time, and no file stays open.
#![allow(clippy::unwrap_used, clippy::panic, reason = "what a test did not expect ends it, in its helpers too")]

mod support;

use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use cuvmm_ipc::wire::{self, Refusal, Reply, WireError};
use cuvmm_ipc::{BufferDescriptor, Error, HostId, Limits, Metadata, receive, send};
use rustix::net::sockopt;
use support::{OpenFiles, descriptor, inodes, memory_file, memory_files, pair, raise_open_files, soon};

/// Sends as a peer of any kind may.
fn send_raw(socket: &UnixStream, bytes: &[u8], handles: &[BorrowedFd<'_>]) {
    support::send_raw(socket, bytes, handles).unwrap();
}

fn send_files(socket: &UnixStream, said: usize, sent: usize) {
    let files = memory_files(sent);
    send_raw(socket, &wire::encode_handles(said), &files.iter().map(AsFd::as_fd).collect::<Vec<_>>());
}

fn header(chunks: usize) -> Vec<u8> {
    wire::encode(&Metadata::new(vec![4096; chunks])).unwrap()
}

fn reply(socket: &mut UnixStream) -> Reply {
    let mut bytes = [0; wire::REPLY_LENGTH];
    socket.read_exact(&mut bytes).unwrap();
    Reply::decode(&bytes).unwrap()
}

/// What a receiver makes of a peer that did all it does beforehand, and what the peer hears of it.
fn receive_from(limits: &Limits, peer: impl FnOnce(&UnixStream)) -> (Error, Option<Reply>) {
    let (ours, mut theirs) = pair();
    peer(&theirs);
    let error = receive(&ours, limits, soon()).unwrap_err();
    drop(ours);
    let mut bytes = [0; wire::REPLY_LENGTH];
    let heard = theirs.read_exact(&mut bytes).is_ok().then(|| Reply::decode(&bytes).unwrap());
    (error, heard)
}

fn refused(reason: Refusal) -> Option<Reply> {
    Some(Reply::Refused { reason, detail: 0 })
}

#[test]
fn any_number_of_handles_arrives_in_order() {
    raise_open_files();
    let files = OpenFiles::watch();
    for chunks in [0, 1, 16, 17, 253, 254, 506, 1114] {
        let (ours, theirs) = pair();
        let sent = descriptor(chunks);
        let received = thread::scope(|scope| {
            let receiver = scope.spawn(|| receive(&theirs, &Limits::default(), soon()));
            send(&ours, &sent, soon()).unwrap();
            receiver.join().unwrap().unwrap()
        });
        assert_eq!(received.metadata(), sent.metadata());
        assert_eq!(inodes(&received), inodes(&sent), "{chunks} chunks");
        assert_eq!(received.fds().len(), chunks);
    }
    files.assert_unchanged();
}

#[test]
fn what_arrives_is_closed_on_exec() {
    let files = OpenFiles::watch();
    let (ours, theirs) = pair();
    let received = thread::scope(|scope| {
        scope.spawn(|| send(&ours, &descriptor(3), soon()).unwrap());
        receive(&theirs, &Limits::default(), soon()).unwrap()
    });
    for handle in received.fds() {
        assert!(rustix::io::fcntl_getfd(handle).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }
    drop((ours, theirs, received));
    files.assert_unchanged();
}

#[test]
fn a_socket_serves_one_exchange_after_another_and_keeps_its_mode() {
    let files = OpenFiles::watch();
    for nonblocking in [false, true] {
        let (ours, theirs) = pair();
        for socket in [&ours, &theirs] {
            socket.set_nonblocking(nonblocking).unwrap();
        }
        for chunks in [1, 40, 0, 300] {
            let sent = descriptor(chunks);
            thread::scope(|scope| {
                scope.spawn(|| send(&ours, &sent, soon()).unwrap());
                assert_eq!(inodes(&receive(&theirs, &Limits::default(), soon()).unwrap()), inodes(&sent));
            });
        }
        for socket in [&ours, &theirs] {
            let flags = rustix::fs::fcntl_getfl(socket).unwrap();
            assert_eq!(flags.contains(rustix::fs::OFlags::NONBLOCK), nonblocking);
        }
    }
    files.assert_unchanged();
}

#[test]
fn handles_live_on_when_the_sender_closes_everything_at_once() {
    let files = OpenFiles::watch();
    let (ours, theirs) = pair();
    // What a sender does whose process ends before anyone reads.
    send_raw(&ours, &header(3), &[]);
    let mut handle = std::fs::File::from(memory_file());
    handle.write_all(b"still here").unwrap();
    send_raw(&ours, &wire::encode_handles(3), &[handle.as_fd(); 3]);
    drop((ours, handle));
    let received = receive(&theirs, &Limits::default(), soon()).unwrap();
    for handle in received.fds() {
        let mut text = [0; 10];
        rustix::io::pread(handle, &mut text, 0).unwrap();
        assert_eq!(&text, b"still here");
    }
    drop((theirs, received));
    files.assert_unchanged();
}

#[test]
fn a_silent_peer_ends_in_a_timeout() {
    let files = OpenFiles::watch();
    let short = || Instant::now() + Duration::from_millis(60);
    let in_time = |since: Instant| assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
    let beginnings: [&dyn Fn(&UnixStream); 5] = [
        &|_| {},
        &|peer| send_raw(peer, &header(20)[..50], &[]),
        &|peer| send_raw(peer, &header(20)[..150], &[]),
        &|peer| send_raw(peer, &header(20), &[]),
        &|peer| {
            send_raw(peer, &header(20), &[]);
            send_files(peer, 16, 16);
        },
    ];
    for begin in beginnings {
        let (ours, theirs) = pair();
        begin(&theirs);
        let since = Instant::now();
        let error = receive(&ours, &Limits::default(), short()).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        assert!(since.elapsed() >= Duration::from_millis(60));
        in_time(since);
    }
    for chunks in [0, 1, 20] {
        let (ours, _theirs) = pair();
        let since = Instant::now();
        let error = send(&ours, &descriptor(chunks), short()).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        in_time(since);
    }
    files.assert_unchanged();
}

#[test]
fn a_deadline_that_passed_still_takes_what_is_there() {
    let files = OpenFiles::watch();
    let (ours, theirs) = pair();
    send_raw(&theirs, &header(2), &[]);
    send_files(&theirs, 2, 2);
    assert_eq!(receive(&ours, &Limits::default(), Instant::now()).unwrap().fds().len(), 2);
    assert!(matches!(receive(&ours, &Limits::default(), Instant::now()), Err(Error::Timeout { .. })));
    drop((ours, theirs));
    files.assert_unchanged();
}

#[test]
fn a_sender_that_closes_midway_is_a_typed_end() {
    let files = OpenFiles::watch();
    for length in [0, 1, 95, 96, 100, header(20).len()] {
        let (ours, theirs) = pair();
        send_raw(&theirs, &header(20)[..length], &[]);
        drop(theirs);
        let error = receive(&ours, &Limits::default(), soon()).unwrap_err();
        assert!(matches!(error, Error::Closed { .. }), "{length}: {error}");
    }
    let (ours, theirs) = pair();
    send_raw(&theirs, &header(20), &[]);
    send_files(&theirs, 10, 10);
    drop(theirs);
    let error = receive(&ours, &Limits::default(), soon()).unwrap_err();
    assert!(matches!(error, Error::Closed { .. }), "{error}");
    drop(ours);
    files.assert_unchanged();
}

#[test]
fn a_receiver_that_closes_midway_is_a_typed_end() {
    let files = OpenFiles::watch();
    for read in [0, 50, 96 + 8 * 300, 96 + 8 * 300 + 4] {
        let (ours, mut theirs) = pair();
        let error = thread::scope(|scope| {
            let sender = scope.spawn(|| send(&ours, &descriptor(300), soon()));
            let mut bytes = vec![0; read];
            theirs.read_exact(&mut bytes).unwrap();
            drop(theirs);
            sender.join().unwrap().unwrap_err()
        });
        assert!(matches!(error, Error::Closed { .. }), "{read}: {error}");
    }
    files.assert_unchanged();
}

#[test]
fn another_number_of_handles_than_was_said_is_refused_and_closed() {
    let files = OpenFiles::watch();
    let check = |chunks: usize, said: usize, sent: usize| {
        let (error, heard) = receive_from(&Limits::default(), |peer| {
            send_raw(peer, &header(chunks), &[]);
            send_files(peer, said, sent);
        });
        assert!(matches!(error, Error::UnexpectedHandles { .. }), "{chunks} {said} {sent}: {error}");
        assert_eq!(heard, refused(Refusal::HANDLES));
    };
    check(4, 4, 0);
    check(4, 4, 3);
    check(4, 4, 6);
    check(4, 6, 6);
    check(4, 6, 4);
    check(4, 0, 1);
    check(4, 4, 253);
    // More than the sixteen that may come unasked.
    check(30, 17, 17);
    check(30, 16, 17);
    check(30, 253, 0);
    files.assert_unchanged();
}

#[test]
fn handles_where_none_belong_are_refused_and_closed() {
    let files = OpenFiles::watch();
    let (error, heard) = receive_from(&Limits::default(), |peer| {
        send_raw(peer, &header(2), &[memory_file().as_fd(), memory_file().as_fd()]);
    });
    assert!(matches!(error, Error::UnexpectedHandles { announced: 0, received: 2 }), "{error}");
    assert_eq!(heard, refused(Refusal::HANDLES));
    let (error, _) = receive_from(&Limits::default(), |peer| {
        send_raw(peer, &header(2)[..96], &[]);
        send_raw(peer, &header(2)[96..], &[memory_file().as_fd()]);
    });
    assert!(matches!(error, Error::UnexpectedHandles { announced: 0, received: 1 }), "{error}");
    // One handle with each byte, though one with all four would do.
    let (error, _) = receive_from(&Limits::default(), |peer| {
        send_raw(peer, &header(3), &[]);
        for byte in wire::encode_handles(3) {
            send_raw(peer, &[byte], &[memory_file().as_fd()]);
        }
    });
    assert!(matches!(error, Error::UnexpectedHandles { announced: 3, received: 4 }), "{error}");
    files.assert_unchanged();
}

#[test]
fn bytes_that_are_no_message_are_refused() {
    let files = OpenFiles::watch();
    let (error, heard) = receive_from(&Limits::default(), |peer| send_raw(peer, &[0x55; 96], &[]));
    assert!(matches!(error, Error::Wire(WireError::Magic { .. })), "{error}");
    assert_eq!(heard, refused(Refusal::MALFORMED));
    let (error, heard) = receive_from(&Limits::default(), |peer| {
        let mut bytes = header(0);
        bytes[4] = 9;
        send_raw(peer, &bytes, &[]);
    });
    assert!(matches!(error, Error::Wire(WireError::Version { found: 9 })), "{error}");
    assert_eq!(heard, refused(Refusal::VERSION));
    let (error, heard) = receive_from(&Limits::default(), |peer| {
        send_raw(peer, &header(1), &[]);
        send_raw(peer, &[254, 0, 0, 0], &[]);
    });
    assert!(matches!(error, Error::Wire(WireError::Handles { found: 254 })), "{error}");
    assert_eq!(heard, refused(Refusal::MALFORMED));
    files.assert_unchanged();
}

#[test]
fn limits_hold_before_anything_is_allocated() {
    let files = OpenFiles::watch();
    let limits = Limits { max_handles: 4, max_bytes: 4 * 4096 };
    let check = |metadata: Metadata, expect: fn(&Error) -> bool, reason| {
        // Only the part of fixed length is there: the limit speaks before the rest is waited for.
        let (error, heard) = receive_from(&limits, |peer| send_raw(peer, &wire::encode(&metadata).unwrap()[..96], &[]));
        assert!(expect(&error), "{error}");
        assert_eq!(heard, refused(reason));
    };
    let many = |error: &Error| matches!(error, Error::TooManyHandles { chunks: 5.., limit: 4 });
    check(Metadata::new(vec![1; 5]), many, Refusal::TOO_MANY_HANDLES);
    check(Metadata::new(vec![1; 100_000]), many, Refusal::TOO_MANY_HANDLES);
    let large = |error: &Error| matches!(error, Error::TooManyBytes { bytes: 16385, limit: 16384 });
    check(Metadata::new(vec![16385]), large, Refusal::TOO_MANY_BYTES);
    // A short buffer in chunks that are too large in all: what is mapped counts.
    let (error, heard) = receive_from(&limits, |peer| {
        let mut metadata = Metadata::new(vec![4096, 3 * 4096 + 1]);
        metadata.size = 1;
        send_raw(peer, &wire::encode(&metadata).unwrap(), &[]);
    });
    assert!(large(&error), "{error}");
    assert_eq!(heard, refused(Refusal::TOO_MANY_BYTES));
    files.assert_unchanged();
}

#[test]
fn another_host_is_refused_before_a_handle_is_received() {
    let files = OpenFiles::watch();
    let Some(here) = HostId::current() else { panic!("this kernel has no boot id") };
    let mut metadata = Metadata::new(vec![4096; 2]);
    metadata.host = HostId::new([0x77; 16]);
    let there = metadata.host.unwrap();
    let (error, heard) = receive_from(&Limits::default(), |peer| {
        send_raw(peer, &wire::encode(&metadata).unwrap(), &[]);
        send_files(peer, 2, 2);
    });
    assert!(matches!(error, Error::WrongHost { ours, theirs } if ours == here && theirs == there), "{error}");
    assert_eq!(heard, refused(Refusal::HOST));
    files.assert_unchanged();
}

#[test]
fn a_sender_that_gives_up_says_so() {
    let files = OpenFiles::watch();
    let (error, heard) = receive_from(&Limits::default(), |peer| {
        send_raw(peer, &header(5), &[]);
        send_files(peer, 3, 3);
        send_files(peer, 0, 0);
    });
    assert!(matches!(error, Error::Abandoned { sent: 3, chunks: 5 }), "{error}");
    assert_eq!(heard, None);
    files.assert_unchanged();
}

#[test]
fn the_sender_hears_why_it_was_refused() {
    let files = OpenFiles::watch();
    for chunks in [2, 300] {
        let (ours, theirs) = pair();
        let limits = Limits { max_handles: 1, ..Limits::default() };
        let error = thread::scope(|scope| {
            scope.spawn(|| receive(theirs, &limits, soon()).unwrap_err());
            send(&ours, &descriptor(chunks), soon()).unwrap_err()
        });
        let expected = matches!(error, Error::Refused { reason: Refusal::TOO_MANY_HANDLES, detail: 0 });
        assert!(expected, "{chunks}: {error}");
    }
    files.assert_unchanged();
}

#[test]
fn a_receiver_that_answers_nonsense_is_a_typed_error() {
    let files = OpenFiles::watch();
    let check = |chunks: usize, answer: &[u8], handles: &[BorrowedFd<'_>], expect: fn(&Error) -> bool| {
        let (ours, mut theirs) = pair();
        send_raw(&theirs, answer, handles);
        let error = send(&ours, &descriptor(chunks), soon()).unwrap_err();
        assert!(expect(&error), "{error}");
        let mut rest = Vec::new();
        drop(ours);
        theirs.read_to_end(&mut rest).unwrap();
    };
    check(1, &[9; 8], &[], |error| matches!(error, Error::Wire(WireError::NotZero { .. })));
    check(1, &Reply::More { handles: 3 }.encode(), &[], |error| matches!(error, Error::UnexpectedReply));
    check(20, &Reply::Accepted.encode(), &[], |error| matches!(error, Error::UnexpectedReply));
    // Even a good reply has no handles.
    let handle = memory_file();
    check(1, &Reply::Accepted.encode(), &[handle.as_fd(); 3], |error| {
        matches!(error, Error::UnexpectedHandles { announced: 0, received: 3 })
    });
    drop(handle);
    files.assert_unchanged();
}

#[test]
fn a_slow_reader_with_a_small_buffer_loses_nothing() {
    raise_open_files();
    let files = OpenFiles::watch();
    let (ours, mut theirs) = pair();
    sockopt::set_socket_send_buffer_size(&ours, 1).unwrap();
    let sent = descriptor(2000);
    let received = thread::scope(|scope| {
        let sender = scope.spawn(|| send(&ours, &sent, soon()));
        // A header of 16 kB passes through a buffer of 4, byte by byte at first.
        let mut bytes = vec![0; 96 + 8 * 2000];
        for byte in bytes.iter_mut().take(40) {
            theirs.read_exact(std::slice::from_mut(byte)).unwrap();
            thread::sleep(Duration::from_millis(1));
        }
        theirs.read_exact(&mut bytes[40..]).unwrap();
        let metadata = wire::decode(&bytes).unwrap();
        let mut handles = Vec::new();
        while handles.len() < 2000 {
            thread::sleep(Duration::from_millis(2));
            let message = read_handles(&theirs);
            handles.extend(message);
            if (16..2000).contains(&handles.len()) {
                theirs.write_all(&Reply::More { handles: 253 }.encode()).unwrap();
            }
        }
        theirs.write_all(&Reply::Accepted.encode()).unwrap();
        sender.join().unwrap().unwrap();
        BufferDescriptor::new(metadata, handles).unwrap()
    });
    assert_eq!(inodes(&received), inodes(&sent));
    drop((ours, theirs, sent, received));
    files.assert_unchanged();
}

/// The handles of one message, read as a receiver of another make may do it.
fn read_handles(socket: &UnixStream) -> Vec<std::os::fd::OwnedFd> {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
    let mut bytes = [0; wire::HANDLES_LENGTH];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut data = [std::io::IoSliceMut::new(&mut bytes)];
    let message = recvmsg(socket, &mut data, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    assert_eq!(message.bytes, 4);
    let mut handles = Vec::new();
    for ancillary in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = ancillary {
            handles.extend(rights);
        }
    }
    assert_eq!(handles.len(), wire::decode_handles(&bytes).unwrap());
    handles
}

#[test]
fn the_receiver_sets_the_pace() {
    let files = OpenFiles::watch();
    let (ours, mut theirs) = pair();
    let sent = descriptor(60);
    thread::scope(|scope| {
        let sender = scope.spawn(|| send(&ours, &sent, soon()));
        theirs.read_exact(&mut vec![0; 96 + 8 * 60]).unwrap();
        let mut batches = vec![read_handles(&theirs).len()];
        for handles in [1, 30, 20] {
            theirs.write_all(&Reply::More { handles }.encode()).unwrap();
            batches.push(read_handles(&theirs).len());
        }
        assert_eq!(batches, [16, 1, 30, 13]);
        theirs.write_all(&Reply::Accepted.encode()).unwrap();
        sender.join().unwrap().unwrap();
    });
    drop((ours, theirs, sent));
    files.assert_unchanged();
}

#[test]
fn other_sockets_are_refused_before_anything_is_sent() {
    let files = OpenFiles::watch();
    let (datagrams, _other) = std::os::unix::net::UnixDatagram::pair().unwrap();
    assert!(matches!(send(&datagrams, &descriptor(1), soon()), Err(Error::NotUnixStream)));
    let network = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    assert!(matches!(receive(&network, &Limits::default(), soon()), Err(Error::NotUnixStream)));
    let error = send(memory_file(), &descriptor(1), soon()).unwrap_err();
    let Error::Os { source, .. } = &error else { panic!("{error}") };
    assert_eq!(source.raw_os_error(), Some(nix::errno::Errno::ENOTSOCK as i32));
    drop((datagrams, _other, network));
    files.assert_unchanged();
}

#[test]
fn the_reply_is_heard_once_per_exchange() {
    let files = OpenFiles::watch();
    let (ours, mut theirs) = pair();
    thread::scope(|scope| {
        scope.spawn(|| receive(&ours, &Limits::default(), soon()).unwrap());
        send_raw(&theirs, &header(20), &[]);
        send_files(&theirs, 16, 16);
        assert_eq!(reply(&mut theirs), Reply::More { handles: 4 });
        send_files(&theirs, 1, 1);
        send_files(&theirs, 3, 3);
        assert_eq!(reply(&mut theirs), Reply::Accepted);
    });
    theirs.set_nonblocking(true).unwrap();
    assert!(theirs.read(&mut [0]).is_err());
    drop((ours, theirs));
    files.assert_unchanged();
}
