//! Who may touch memory, and by whom it is then copied: by the host, by a device of those that were granted it, or by
//! nobody.
//!
//! # Safety
//! A range that is given away is the test's own.
#![allow(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use cuvmm::driver::sys::CUmemLocation;
use cuvmm::resource::Error;
use cuvmm::{
    Access, CUresult, Call, GrowOptions, Location, Options, Release, VirtualMemoryBuffer, VirtualMemoryResource,
};
use cuvmm_tests::{Backend, ForeignRange, G, ROOM, Stream, bytes_of, require_marks, write_marks};

cuvmm_tests::suite!(
    what_a_device_may_not_do_is_told_before_any_call,
    what_a_device_may_not_do_to_its_own_memory_is_told_before_any_call,
    what_the_host_was_not_granted_it_does_not_touch,
);

cuvmm_tests::suite!(
    two gpus:
    a_peer_is_granted_memory_of_the_host,
    a_peer_alone_may_be_granted_memory,
);

fn resource(backend: &Backend, options: Options) -> VirtualMemoryResource {
    VirtualMemoryResource::new(&backend.device, options).unwrap()
}

/// A resource of the host's memory that the device may use so.
fn granted(backend: &Backend, access: Access) -> VirtualMemoryResource {
    resource(backend, Options::new().location(Location::HostNuma(0)).own_access(access))
}

/// Demands that the driver is not asked for copies and fills that need more than `access`, neither on a stream that was
/// given nor on a default stream.
fn require_refused(backend: &Backend, buffer: &VirtualMemoryBuffer, access: Access) {
    let [token, ..] = Stream::tokens(&backend.driver);
    let named = Stream::non_blocking(&backend.device);
    for stream in [&token, &named] {
        backend.require_no_call(|| {
            let refused = Err(Error::NotAccessible { needed: Access::ReadWrite });
            assert_eq!(buffer.fill_on(stream, 0, 1, 1), refused);
            assert_eq!(buffer.copy_from_host_on(stream, G - 1, &[1]), refused);
            // What is refused for other reasons, or is nothing, is so first.
            assert!(matches!(buffer.fill_on(stream, G, 1, 1), Err(Error::OutOfBounds { .. })));
            buffer.fill_on(stream, 1, 0, 1).unwrap();
        });
        let read = || buffer.copy_to_host_on(stream, 0, &mut [0]);
        match access {
            Access::None => {
                let result = backend.require_no_call(read);
                assert_eq!(result, Err(Error::NotAccessible { needed: Access::Read }));
            }
            _ => read().unwrap(),
        }
    }
}

fn what_a_device_may_not_do_is_told_before_any_call(backend: &Backend) {
    for access in [Access::None, Access::Read] {
        let buffer = granted(backend, access).allocate(G).unwrap();
        require_refused(backend, &buffer, access);
        // The host may always.
        write_marks(&buffer, 1);
        require_marks(&buffer, 1, G);
    }
}

fn what_a_device_may_not_do_to_its_own_memory_is_told_before_any_call(backend: &Backend) {
    for access in [Access::None, Access::Read] {
        let resource = resource(backend, Options::new().own_access(access));
        let buffer = resource.allocate(G).unwrap();
        require_refused(backend, &buffer, access);
        backend.require_no_call(|| {
            let refused = Err(Error::NotAccessible { needed: Access::ReadWrite });
            assert_eq!(buffer.fill(0, 1, 1), refused);
            assert_eq!(buffer.copy_from_host(0, &[1]), refused);
            assert_eq!(resource.allocate_zeroed(G).map(drop), Err(Error::NotWritable));
        });
        let read = || buffer.copy_to_host(0, &mut [0]);
        match access {
            Access::None => {
                let result = backend.require_no_call(read);
                assert_eq!(result, Err(Error::NotAccessible { needed: Access::Read }));
            }
            _ => read().unwrap(),
        }
    }
}

/// A range of others may have chunks that only a device was granted: the driver copies those.
fn what_the_host_was_not_granted_it_does_not_touch(backend: &Backend) {
    let resource = granted(backend, Access::ReadWrite);
    let mut range = ForeignRange::reserve(backend, CUmemLocation::host_numa(0), ROOM);
    for (index, offset) in [0, G, 2 * G].into_iter().enumerate() {
        range.map(offset, G);
        let everybody = range.everybody(backend);
        let device_alone = &everybody[..1];
        range.grant(index, if index == 1 { &everybody } else { device_alone });
        range.release(index);
    }
    // SAFETY: it is the range's, which is the test's and used no more.
    let buffer = unsafe { resource.from_raw(range.address, range.size, Release::Caller) }.unwrap();
    assert_eq!((buffer.size(), buffer.host_pointer()), (3 * G, None));
    backend.require_no_call(|| buffer.fill(G, G, 1)).unwrap();
    let fills = || backend.ledger.count(Call::cuMemsetD8Async);
    for (offset, bytes) in [(0, G), (G - 1, 2), (2 * G - 1, 2), (2 * G, G)] {
        let before = fills();
        buffer.fill(offset, bytes, 2).unwrap();
        // Mapping by mapping.
        assert_eq!(fills(), before + if bytes == 2 { 2 } else { 1 }, "{offset:#x}");
    }
    let bytes = bytes_of(&buffer);
    assert!(bytes[G + 1..2 * G - 1].iter().all(|byte| *byte == 1));
    assert!(bytes[..=G].iter().chain(&bytes[2 * G - 1..]).all(|byte| *byte == 2));
    // What is added is the host's.
    let grown = buffer.grow_with(4 * G, &GrowOptions::new().zeroed()).unwrap();
    backend.require_no_call(|| grown.fill(3 * G, G, 3)).unwrap();
    assert_eq!(grown.host_pointer(), None);
    grown.truncate_into(G).unwrap().close().unwrap();
    buffer.close().unwrap();
}

fn a_peer_is_granted_memory_of_the_host(backend: &Backend) {
    let peer = backend.driver.device(1).unwrap();
    let [own, other] = [&backend.device, &peer].map(Stream::non_blocking);
    for location in [Location::Host, Location::HostNuma(0)] {
        let options = || Options::new().location(location);
        let buffer = resource(backend, options().peer(&peer, Access::ReadWrite)).allocate(G).unwrap();
        assert_eq!(buffer.chunks()[0].access.len(), 3);
        write_marks(&buffer, 1);
        let mut seen = [0; 1];
        buffer.copy_from_host_on(&other, 100, &[0x77]).unwrap();
        buffer.copy_to_host_on(&own, 100, &mut seen).unwrap();
        assert_eq!(seen, [0x77]);
        buffer.fill_on(&other, 0, G, 6).unwrap();
        // The growth is granted to it, too.
        let grown = buffer.grow(2 * G).unwrap();
        grown.fill_on(&other, 0, 2 * G, 7).unwrap();
        assert!(bytes_of(&grown).iter().all(|byte| *byte == 7));
        grown.fill_on(&own, 0, 2 * G, 8).unwrap();
        assert!(bytes_of(&grown).iter().all(|byte| *byte == 8));

        let readable = resource(backend, options().peer(&peer, Access::Read)).allocate(G).unwrap();
        readable.fill(0, G, 5).unwrap();
        readable.copy_to_host_on(&other, G - 1, &mut seen).unwrap();
        assert_eq!(seen, [5]);
        // Whose stream it is the driver knows.
        let error = readable.fill_on(&other, 0, G, 1).unwrap_err();
        assert_eq!((error.call(), error.code()), (Some(Call::cuMemsetD8Async), Some(CUresult::INVALID_VALUE)));
        assert!(bytes_of(&readable).iter().all(|byte| *byte == 5));
    }
}

fn a_peer_alone_may_be_granted_memory(backend: &Backend) {
    let peer = backend.driver.device(1).unwrap();
    let stream = Stream::non_blocking(&peer);
    let [token, ..] = Stream::tokens(&backend.driver);
    for location in [Location::Device, Location::HostNuma(0)] {
        let options = Options::new().location(location).own_access(Access::None).peer(&peer, Access::ReadWrite);
        let buffer = resource(backend, options).allocate(G).unwrap();
        assert!(buffer.resource().is_device_accessible());
        // A default stream's token is the own device's.
        let refused = backend.require_no_call(|| buffer.fill_on(&token, 0, G, 1));
        assert_eq!(refused, Err(Error::NotAccessible { needed: Access::ReadWrite }));
        buffer.fill_on(&stream, 0, G, 9).unwrap();
        let mut seen = [0; 16];
        buffer.copy_to_host_on(&stream, G - 16, &mut seen).unwrap();
        assert_eq!(seen, [9; 16]);
        buffer.close_on(&stream).unwrap();
    }
}
