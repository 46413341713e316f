//! What an importer is told beyond the descriptor: whose handles they are, what its buffers wait for, and whether memory of
//! a device that is hidden from it will do.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuvmm::ipc::{BufferDescriptor, Error, HandleFd, Importer, export, import, receive, send, wire};
use cuvmm::{CUresult, Call, HandleKind, Limits, Options, Release, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_tests::{Backend, G, Gate, Kind, Peer, Stream, is_idle, require_marks, write_marks};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

cuvmm_tests::suite!(
    handles_that_are_borrowed_owned_and_shared_are_imported,
    the_release_stream_of_an_importer_is_waited_for,
    a_buffer_whose_receiver_never_got_it_waits_for_no_stream,
);

cuvmm_tests::suite!(
    two gpus:
    handles_alone_are_for_the_importers_device_and_the_driver_says_otherwise,
    memory_of_a_hidden_device_is_refused_unless_it_is_asked_for,
);

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

fn three_chunks(resource: &VirtualMemoryResource) -> VirtualMemoryBuffer {
    let buffer = resource.allocate(G).unwrap().grow_into(2 * G).unwrap().grow_into(3 * G).unwrap();
    write_marks(&buffer, 1);
    buffer
}

/// The buffers of the second device, of which there are two where this is asked.
fn of_the_second(backend: &Backend) -> VirtualMemoryResource {
    let device = backend.driver.device(1).unwrap();
    VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::PosixFd)).unwrap()
}

fn handles_that_are_borrowed_owned_and_shared_are_imported(backend: &Backend) {
    let resource = backend.shareable();
    let buffer = three_chunks(&resource);
    let (_, mut files) = export(&buffer).unwrap().into_parts().unwrap();
    let (shared, owned, borrowed) = (files.pop().unwrap(), files.pop().unwrap(), files.pop().unwrap());
    let shared: Arc<OwnedFd> = Arc::new(shared);
    let handles: [HandleFd<'_>; 3] = [borrowed.as_fd().into(), owned.into(), Arc::clone(&shared).into()];
    let descriptor = BufferDescriptor::from_fds(handles, &[G; 3], Some(2 * G + 1)).unwrap();
    assert_eq!((descriptor.device_uuid(), descriptor.id(), descriptor.host()), (None, None, None));
    buffer.close().unwrap();
    let imported = import(&resource, descriptor).unwrap();
    assert_eq!(imported.size(), 2 * G + 1);
    require_marks(&imported, 1, 2 * G);
    imported.close().unwrap();
    // Those that are others' are open, and still name the memory.
    let again = BufferDescriptor::from_fds([borrowed.as_fd(), shared.as_fd()], &[G; 2], None).unwrap();
    import(&resource, again).unwrap().close().unwrap();
}

fn the_release_stream_of_an_importer_is_waited_for(backend: &Backend) {
    let resource = backend.shareable();
    let descriptor = export(&three_chunks(&resource)).unwrap();
    let stream = Stream::non_blocking(&backend.device);
    let imported = Importer::new(&resource).release(Release::Stream(stream.clone())).import(descriptor).unwrap();
    let gate = Gate::close(&stream);
    gate.require_wait(&stream, || imported.close()).unwrap();
}

/// Sends as much as it takes until nothing more can be.
fn fill(socket: &UnixStream) {
    socket.set_nonblocking(true).unwrap();
    while (&*socket).write(&[0; 4096]).is_ok() {}
    while (&*socket).write(&[0]).is_ok() {}
}

/// Sends a descriptor, as a peer that never reads what is answered.
fn send_deaf(socket: &UnixStream, descriptor: &BufferDescriptor) {
    (&*socket).write_all(&wire::encode(descriptor.metadata()).unwrap()).unwrap();
    let files: Vec<RawFd> = descriptor.fds().map(|file| file.as_raw_fd()).collect();
    let count = wire::encode_handles(files.len());
    let rights = [ControlMessage::ScmRights(&files)];
    sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(&count)], &rights, MsgFlags::empty(), None).unwrap();
}

fn a_buffer_whose_receiver_never_got_it_waits_for_no_stream(backend: &Backend) {
    let resource = backend.shareable();
    let descriptor = export(&three_chunks(&resource)).unwrap();
    let stream = Stream::non_blocking(&backend.device);
    let importer = Importer::new(&resource).release(Release::Stream(stream.clone()));
    let (ours, theirs) = UnixStream::pair().unwrap();
    fill(&ours);
    send_deaf(&theirs, &descriptor);
    let gate = Gate::close(&stream);
    let mark = backend.mark();
    let deadline = Instant::now() + Duration::from_millis(100);
    let error = importer.receive(&ours, &Limits::default(), deadline).unwrap_err();
    assert!(matches!(error, Error::Timeout { operation: "say that all handles came" }), "{error:?}");
    // A drop that waits would leave it until the stream is idle.
    backend.require_unchanged(&mark);
    assert!(!is_idle(&stream));
    drop(gate);
}

fn handles_alone_are_for_the_importers_device_and_the_driver_says_otherwise(backend: &Backend) {
    let buffer = of_the_second(backend).allocate(G).unwrap();
    write_marks(&buffer, 1);
    let exported = export(&buffer).unwrap();
    let told = || BufferDescriptor::from_fds(exported.fds(), &[G], None).unwrap();
    let mark = backend.mark();
    let error = import(&backend.shareable(), told()).unwrap_err();
    assert!(matches!(error, Error::OtherMemory { found, .. } if found.id == 1), "{error:?}");
    backend.require_unchanged(&mark);
    let imported = import(&of_the_second(backend), told()).unwrap();
    require_marks(&imported, 1, G);
    imported.close().unwrap();
    buffer.close().unwrap();
}

fn memory_of_a_hidden_device_is_refused_unless_it_is_asked_for(backend: &Backend) {
    if let Some((_, socket)) = Peer::role() {
        assert_eq!(backend.driver.device_count(), 1);
        let resource = backend.shareable();
        let descriptor = receive(&socket, &Limits::default(), soon()).unwrap();
        let mark = backend.mark();
        let imports = backend.ledger.count(Call::cuMemImportFromShareableHandle);
        let error = Importer::new(&resource).import_from(&descriptor).unwrap_err();
        backend.require_unchanged(&mark);
        let told = descriptor.device_uuid();
        assert!(matches!(error, Error::HiddenDevice { uuid } if uuid == told && told.is_some()), "{error:?}");
        assert_eq!(backend.ledger.count(Call::cuMemImportFromShareableHandle), imports);
        let answer = match Importer::new(&resource).allow_hidden_device().import(descriptor) {
            Ok(imported) => {
                require_marks(&imported, 1, G);
                write_marks(&imported, 2);
                imported.close().unwrap();
                b"2"
            }
            Err(error) => {
                assert_eq!(error.code(), Some(CUresult::INVALID_DEVICE), "{error}");
                b"1"
            }
        };
        (&socket).write_all(answer).unwrap();
        return;
    }
    let peer = Peer::start_seeing_one(backend, "importer");
    let buffer = of_the_second(backend).allocate(G).unwrap();
    write_marks(&buffer, 1);
    send(&peer.socket, &export(&buffer).unwrap(), soon()).unwrap();
    let mut answer = [0];
    (&peer.socket).read_exact(&mut answer).unwrap();
    peer.join();
    println!("memory of a hidden device: {}", if answer == *b"2" { "imported" } else { "refused by the driver" });
    match backend.kind {
        Kind::StrictPair => assert_eq!(answer, *b"1"),
        Kind::MeasuredPair => assert_eq!(answer, *b"2"),
        _ => {}
    }
    require_marks(&buffer, answer[0] - b'0', G);
    buffer.close().unwrap();
}
