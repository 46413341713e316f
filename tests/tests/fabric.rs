//! Fabric handles: where the machine gives none, everything says so with one reason; where it does, they are shared.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::{Duration, Instant};

use cuvmm::driver::Probe;
use cuvmm::driver::sys::{CUdevice_attribute, CUmemAllocationHandleType};
use cuvmm::ipc::{self, Error, export, export_as, import, import_from};
use cuvmm::{Call, HandleKind, Limits, Options, StreamRef, VirtualMemoryResource, resource};
use cuvmm_tests::{Backend, G, Peer, in_host_function, require_marks, until, write_marks};

cuvmm_tests::suite!(
    the_probe_the_resource_and_its_fallback_agree,
    memory_is_shared_with_another_process,
    what_an_exporter_took_with_it_is_a_typed_error,
    a_descriptor_keeps_the_memory_that_its_handles_name,
    a_descriptor_is_dropped_in_a_host_function,
);

const FABRIC: CUmemAllocationHandleType = CUmemAllocationHandleType::FABRIC;

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// A resource of memory with fabric handles; none where the machine refuses. Only GPUs may, with one reason everywhere,
/// and so nothing made: that is then all there is to see.
fn resource_of(backend: &Backend) -> Option<VirtualMemoryResource> {
    let mark = backend.mark();
    match VirtualMemoryResource::new(&backend.device, Options::new().handle_kind(HandleKind::Fabric)) {
        Ok(resource) => Some(resource),
        Err(refused) => {
            assert!(backend.is_gpu(), "{refused}");
            println!("no fabric handles on this machine: {refused}");
            match (backend.device.probe(FABRIC), refused) {
                (Probe::Refused { error, .. }, resource::Error::HandleKindRefused { error: told, .. }) => {
                    assert_eq!(told, error);
                }
                (Probe::Refused { .. }, resource::Error::Unsupported { .. }) => {}
                other => panic!("{other:?}"),
            }
            backend.require_unchanged(&mark);
            None
        }
    }
}

fn agree(backend: &Backend) {
    let device = &backend.device;
    let promised = device.attribute(CUdevice_attribute::HANDLE_TYPE_FABRIC_SUPPORTED).unwrap();
    let probe = device.probe(FABRIC);
    let made = VirtualMemoryResource::new(device, Options::new().handle_kind(HandleKind::Fabric));
    match (&probe, &made) {
        (Probe::Available, Ok(resource)) => assert_eq!(resource.handle_kind(), HandleKind::Fabric),
        (Probe::Refused { error, .. }, Err(resource::Error::HandleKindRefused { error: told, .. })) => {
            assert_eq!((promised, told), (Some(1), error));
        }
        (Probe::Refused { .. }, Err(resource::Error::Unsupported { .. })) => assert_ne!(promised, Some(1)),
        other => panic!("{other:?}"),
    }
    // What is probed once is not made again.
    let creates = backend.ledger.count(Call::cuMemCreate);
    assert_eq!(device.probe(FABRIC).is_available(), probe.is_available());
    assert_eq!(backend.ledger.count(Call::cuMemCreate), creates);

    let fallback = Options::new().handle_kind_or(HandleKind::Fabric, HandleKind::PosixFd);
    let resource = VirtualMemoryResource::new(device, fallback).unwrap();
    let expect = if made.is_ok() { HandleKind::Fabric } else { HandleKind::PosixFd };
    assert_eq!((resource.handle_kind(), resource.handle_refused().is_some()), (expect, made.is_err()));
    // Either way its memory is shared, grown chunks too, as what the resource says.
    let buffer = resource.allocate(G).unwrap().grow_into(2 * G).unwrap();
    write_marks(&buffer, 1);
    let descriptor = export(&buffer).unwrap();
    assert_eq!(descriptor.handle_kind(), expect.as_driver());
    let imported = import(&resource, descriptor).unwrap();
    require_marks(&imported, 1, 2 * G);
    imported.close().unwrap();
    if made.is_err() {
        let refused = backend.require_no_call(|| export_as(&buffer, HandleKind::Fabric).unwrap_err());
        assert!(matches!(refused, Error::NotExportable { wanted: FABRIC, .. }), "{refused}");
    }
    buffer.close().unwrap();
    drop((resource, made));
    backend.require_clean();
}

fn the_probe_the_resource_and_its_fallback_agree(backend: &Backend) {
    agree(backend);
    agree(&backend.with_channel());
}

fn memory_is_shared_with_another_process(backend: &Backend) {
    let backend = &backend.with_channel();
    let role = Peer::role();
    let Some(resource) = resource_of(backend) else { return };
    if let Some((_, socket)) = role {
        let by_value = ipc::receive_buffer(&socket, &resource, &Limits::default(), deadline()).unwrap();
        let descriptor = ipc::receive(&socket, &Limits::default(), deadline()).unwrap();
        assert_eq!((descriptor.handle_kind(), descriptor.fds().len()), (FABRIC, 0));
        let imported = import(&resource, descriptor).unwrap();
        Peer::signal(&socket);
        Peer::await_signal(&socket);
        // The exporter has let go of all by now.
        for (buffer, seed) in [(&by_value, 1), (&imported, 1)] {
            require_marks(buffer, seed, 3 * G);
        }
        write_marks(&by_value, 2);
        require_marks(&imported, 2, 3 * G);
        return;
    }
    let buffer = resource.allocate(G).unwrap().grow_into(3 * G).unwrap();
    write_marks(&buffer, 1);
    let peer = Peer::start(backend, "importer");
    ipc::send_buffer(&peer.socket, &buffer, deadline()).unwrap();
    let descriptor = export(&buffer).unwrap();
    buffer.close().unwrap();
    ipc::send(&peer.socket, &descriptor, deadline()).unwrap();
    Peer::await_signal(&peer.socket);
    descriptor.close();
    Peer::signal(&peer.socket);
    peer.join();
    backend.require_clean();
}

fn what_an_exporter_took_with_it_is_a_typed_error(backend: &Backend) {
    let backend = &backend.with_channel();
    let role = Peer::role();
    let Some(resource) = resource_of(backend) else { return };
    if let Some((_, socket)) = role {
        let descriptor = export(&resource.allocate(2 * G).unwrap()).unwrap();
        ipc::send(&socket, &descriptor, deadline()).unwrap();
        Peer::await_signal(&socket);
        return;
    }
    let peer = Peer::start(backend, "exporter");
    let descriptor = ipc::receive(&peer.socket, &Limits::default(), deadline()).unwrap();
    let first = import_from(&resource, &descriptor).unwrap();
    write_marks(&first, 3);
    peer.kill();
    // What was imported stays, and names the memory no less than its maker did: only then is it gone.
    require_marks(&first, 3, 2 * G);
    first.close().unwrap();
    let mark = backend.mark();
    let error = import_from(&resource, &descriptor).unwrap_err();
    assert_eq!(error.call(), Some(Call::cuMemImportFromShareableHandle), "{error}");
    backend.require_unchanged(&mark);
    drop(descriptor);
    backend.require_clean();
}

fn a_descriptor_keeps_the_memory_that_its_handles_name(backend: &Backend) {
    let backend = &backend.with_channel();
    let Some(resource) = resource_of(backend) else { return };
    let buffer = resource.allocate(G).unwrap().grow_into(3 * G).unwrap();
    write_marks(&buffer, 4);
    let descriptor = export(&buffer).unwrap();
    buffer.close().unwrap();
    let (live, clone) = (backend.ledger.live(), descriptor.try_clone().unwrap());
    assert_eq!((live.allocations, live.mappings), (2, 0));
    descriptor.close();
    let imported = import(&resource, clone).unwrap();
    require_marks(&imported, 4, 3 * G);
    assert_eq!(backend.ledger.live().allocations, 2, "the import's own");
    imported.close().unwrap();
    assert_eq!(backend.ledger.live().allocations, 0);
    backend.require_clean();
}

fn a_descriptor_is_dropped_in_a_host_function(backend: &Backend) {
    let backend = &backend.with_channel();
    let Some(resource) = resource_of(backend) else { return };
    let stream = StreamRef::create(&backend.device).unwrap();
    let buffer = resource.allocate(2 * G).unwrap();
    let (shared, last) = (export(&buffer).unwrap(), export(&buffer).unwrap());
    in_host_function(&stream, || drop(shared));
    buffer.close().unwrap();
    in_host_function(&stream, || drop(last));
    until("the memory is gone", || backend.ledger.live().allocations == 0);
    // Only the last share is to be released, and so asked about.
    backend.require_questions(1);
    assert!(backend.driver.stranded().is_empty());
    backend.require_clean();
}
