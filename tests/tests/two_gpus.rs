//! Two devices of one host: memory, contexts and descriptors of the one are not the other's.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use cuvmm::ipc::{Error, Location, export, import, import_from};
use cuvmm::{BufferDescriptor, Call, Device, HandleKind, Options, Outcome, Release, StreamRef, VirtualMemoryResource};
use cuvmm_tests::{
    Backend, Current, G, Gate, ROOM, Stream, is_idle, occupy_behind, queue_fill, require_marks, write_marks,
};

cuvmm_tests::suite!(
    two gpus:
    a_descriptor_of_the_other_device_is_refused_before_the_import,
    memory_of_the_other_device_is_found_out_by_the_drivers_word,
    a_descriptor_finds_its_device_by_the_uuid,
    buffers_of_the_second_device_do_not_mind_the_firsts_context,
    each_device_waits_for_its_own_default_stream,
    a_fence_on_a_stream_of_the_other_device_is_waited_for,
    a_copy_on_a_stream_of_the_other_device_does_not_reach_the_memory,
);

fn second(backend: &Backend) -> Device {
    backend.driver.device(1).unwrap()
}

fn shareable(device: &Device) -> VirtualMemoryResource {
    VirtualMemoryResource::new(device, Options::new().handle_kind(HandleKind::PosixFd)).unwrap()
}

fn plain(device: &Device) -> VirtualMemoryResource {
    VirtualMemoryResource::new(device, Options::new()).unwrap()
}

fn a_descriptor_of_the_other_device_is_refused_before_the_import(backend: &Backend) {
    let (here, there) = (shareable(&backend.device), shareable(&second(backend)));
    let buffer = there.allocate(G).unwrap();
    let descriptor = export(&buffer).unwrap();
    let mark = backend.mark();
    let imports = backend.ledger.count(Call::cuMemImportFromShareableHandle);
    let error = import_from(&here, &descriptor).unwrap_err();
    assert!(matches!(error, Error::WrongLocation { .. }), "{error:?}");
    assert_eq!(backend.ledger.count(Call::cuMemImportFromShareableHandle), imports);
    backend.require_unchanged(&mark);
    buffer.close().unwrap();
}

fn memory_of_the_other_device_is_found_out_by_the_drivers_word(backend: &Backend) {
    let (here, there) = (shareable(&backend.device), shareable(&second(backend)));
    let buffer = there.allocate(G).unwrap();
    let (mut metadata, files) = export(&buffer).unwrap().into_parts().unwrap();
    metadata.location = Some(Location::Device { uuid: backend.device.uuid().unwrap() });
    let mark = backend.mark();
    let error = import(&here, BufferDescriptor::new(metadata, files).unwrap()).unwrap_err();
    assert!(matches!(error, Error::OtherMemory { chunk: 0, expected, .. } if expected.id == 0), "{error:?}");
    backend.require_unchanged(&mark);
    buffer.close().unwrap();
}

fn a_descriptor_finds_its_device_by_the_uuid(backend: &Backend) {
    let buffer = shareable(&second(backend)).allocate(G).unwrap();
    write_marks(&buffer, 1);
    let descriptor = export(&buffer).unwrap();
    let device = backend.driver.device_by_uuid(descriptor.device_uuid().unwrap()).unwrap().unwrap();
    assert_eq!(device.ordinal(), 1);
    let alias = import(&shareable(&device), descriptor).unwrap();
    require_marks(&alias, 1, G);
    alias.close().unwrap();
    buffer.close().unwrap();
}

fn buffers_of_the_second_device_do_not_mind_the_firsts_context(backend: &Backend) {
    let current = Current::push(&backend.device);
    let resource = plain(&second(backend));
    let stream = StreamRef::create(&second(backend)).unwrap();
    let buffer = resource.allocate(G).unwrap();
    write_marks(&buffer, 2);
    buffer.fence(&stream).unwrap();
    buffer.fill_on(&stream, 100, 8, 0).unwrap();
    let occupied = occupy_behind(&buffer);
    let moved = buffer.grow(ROOM + G).unwrap();
    drop(occupied);
    assert_eq!(moved.outcome(), Some(Outcome::Moved));
    moved.fill(100, 8, 2).unwrap();
    moved.copy_to_host(G - 8, &mut [0; 16]).unwrap();
    buffer.close().unwrap();
    moved.close_on(&stream).unwrap();
    assert_eq!(backend.driver.ctx_get_current().unwrap(), current.context);
    if let Some(simulator) = &backend.simulator {
        assert_eq!((simulator.physical_bytes(0), simulator.physical_bytes(1)), (0, 0));
    }
}

fn each_device_waits_for_its_own_default_stream(backend: &Backend) {
    let (first, other) = (Stream::blocking(&backend.device), Stream::blocking(&second(backend)));
    let held = Gate::close(&first);
    let buffer = plain(&second(backend)).allocate(G).unwrap();
    let gate = Gate::close(&other);
    queue_fill(&other, &buffer, 1);
    gate.require_wait(&other, || buffer.close()).unwrap();
    assert!(!is_idle(&first), "it waited for the other device");
    held.open();
    first.synchronize().unwrap();
}

fn a_fence_on_a_stream_of_the_other_device_is_waited_for(backend: &Backend) {
    let buffer = plain(&second(backend)).allocate(G).unwrap();
    buffer.set_release(Release::Caller).unwrap();
    let stream = Stream::non_blocking(&backend.device);
    let gate = Gate::close(&stream);
    buffer.fence(&stream).unwrap();
    gate.require_wait(&stream, || buffer.close()).unwrap();
}

fn a_copy_on_a_stream_of_the_other_device_does_not_reach_the_memory(backend: &Backend) {
    // Access was granted to the memory's own device alone.
    let buffer = plain(&second(backend)).allocate(G).unwrap();
    write_marks(&buffer, 3);
    let stream = Stream::non_blocking(&backend.device);
    let error = buffer.fill_on(&stream, 0, G, 0).unwrap_err();
    assert_eq!(error.call(), Some(Call::cuMemsetD8Async), "{error}");
    require_marks(&buffer, 3, G);
    buffer.close().unwrap();
    stream.synchronize().unwrap();
}
