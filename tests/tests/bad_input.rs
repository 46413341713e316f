//! Bad input gets a typed error before any driver call: sizes that overflow, devices that are not there, values of
//! two drivers in one operation, bytes that lie outside.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use cuvmm::driver::sys::{CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp};
use cuvmm::handles::{Allocation, Granularity, Mapping, Reservation};
use cuvmm::{HandleKind, Options, Release, VirtualMemoryBuffer, VirtualMemoryResource, driver, handles, ipc};
use cuvmm_resource::Error;
use cuvmm_tests::{Backend, G, Stream, require_marks, write_marks};

cuvmm_tests::suite!(
    sizes_that_overflow_are_refused_before_any_call,
    devices_that_are_not_there_are_refused_before_any_call,
    alignments_that_are_no_power_of_two_are_refused_before_any_call,
    bytes_outside_of_the_buffer_are_refused_before_any_call,
    streams_of_another_driver_are_refused_before_any_call,
    a_buffer_comes_back_from_a_close_on_a_stream_of_another_driver,
    allocations_and_reservations_of_two_drivers_do_not_meet,
    memory_made_for_no_handle_is_not_exported,
    chunks_that_make_no_buffer_are_refused_before_any_call,
    ranges_outside_of_a_reservation_are_refused_before_any_call,
    a_range_that_is_taken_is_refused_before_any_call,
    an_unknown_attribute_is_told_as_unknown_and_changes_nothing,
);

/// More than there are addresses, once rounded up or added.
const OVERFLOWS: [usize; 3] = [usize::MAX, usize::MAX - G + 2, usize::MAX - 1];

fn sizes_that_overflow_are_refused_before_any_call(backend: &Backend) {
    let resource = backend.resource();
    let buffer = resource.allocate(G).unwrap();
    write_marks(&buffer, 1);
    let empty = resource.allocate(0).unwrap();
    let is_overflow = |error: &Error| matches!(error, Error::Handles(handles::Error::SizeOverflow { granularity, .. }) if *granularity >= G);
    for size in OVERFLOWS {
        backend.require_no_call(|| {
            for result in [
                resource.allocate(size),
                resource.allocate_with_capacity(size, 0),
                resource.allocate_with_capacity(size, size),
                buffer.grow(size),
                empty.grow(size),
            ] {
                let error = result.unwrap_err();
                assert!(is_overflow(&error), "{size:#x}: {error}");
                assert_eq!(error.code(), None);
            }
        });
    }
    let buffer = backend.require_no_call(|| {
        let error = buffer.grow_into(usize::MAX).unwrap_err();
        assert!(is_overflow(error.error()));
        error.into_buffer()
    });
    require_marks(&buffer, 1, G);
    buffer.close().unwrap();
}

fn devices_that_are_not_there_are_refused_before_any_call(backend: &Backend) {
    let count = backend.driver.device_count();
    backend.require_no_call(|| {
        for ordinal in [-1, count, 99, i32::MAX, i32::MIN] {
            let error = backend.driver.device(ordinal).unwrap_err();
            assert_eq!(error, driver::Error::NoSuchDevice { ordinal, count });
        }
    });
}

fn alignments_that_are_no_power_of_two_are_refused_before_any_call(backend: &Backend) {
    backend.require_no_call(|| {
        for alignment in [3, 3 << 20, (2 << 20) + 1, usize::MAX] {
            let options = Options::new().alignment(alignment);
            let error = VirtualMemoryResource::new(&backend.device, options).unwrap_err();
            assert_eq!(error, Error::Alignment { alignment });
            let size = Reservation::GRANULARITY.round_up(1).unwrap();
            let error = Reservation::reserve(&backend.driver, size, alignment).unwrap_err();
            assert_eq!(error, handles::Error::Alignment { alignment });
        }
    });
}

fn bytes_outside_of_the_buffer_are_refused_before_any_call(backend: &Backend) {
    let resource = backend.resource();
    let stream = Stream::non_blocking(&backend.device);
    let (buffer, empty) = (resource.allocate(G).unwrap(), resource.allocate(0).unwrap());
    let refused = |buffer: &VirtualMemoryBuffer, offset: usize, bytes: usize| {
        let size = buffer.size();
        let expected = Err(Error::OutOfBounds { offset, bytes, size });
        assert_eq!(buffer.fill(offset, bytes, 0), expected);
        assert_eq!(buffer.fill_on(&stream, offset, bytes, 0), expected);
        if bytes <= 2 * G {
            let mut host = vec![0; bytes];
            assert_eq!(buffer.copy_from_host(offset, &host), expected);
            assert_eq!(buffer.copy_from_host_on(&stream, offset, &host), expected);
            assert_eq!(buffer.copy_to_host(offset, &mut host), expected);
            assert_eq!(buffer.copy_to_host_on(&stream, offset, &mut host), expected);
        }
    };
    backend.require_no_call(|| {
        for (offset, bytes) in [(0, G + 1), (G, 1), (G - 1, 2), (G + 1, 0), (usize::MAX, 1), (usize::MAX, 0)] {
            refused(&buffer, offset, bytes);
        }
        for (offset, bytes) in [(1, usize::MAX), (usize::MAX, usize::MAX), (usize::MAX - G + 2, G)] {
            refused(&buffer, offset, bytes);
        }
        refused(&empty, 0, 1);
        refused(&empty, 1, 0);
        // No bytes, at the very end too, are fine, and need no call.
        buffer.fill(G, 0, 1).unwrap();
        buffer.copy_from_host(G, &[]).unwrap();
        buffer.copy_to_host(0, &mut []).unwrap();
        empty.fill(0, 0, 1).unwrap();
    });
    buffer.close().unwrap();
}

fn streams_of_another_driver_are_refused_before_any_call(backend: &Backend) {
    let other = backend.another();
    let theirs = Stream::non_blocking(&other.device);
    let buffer = backend.resource().allocate(G).unwrap();
    write_marks(&buffer, 2);
    let is_mixed = |error: &Error| *error == Error::Driver(driver::Error::DifferentDrivers);
    other.require_no_call(|| {
        backend.require_no_call(|| {
            assert!(is_mixed(&buffer.set_release(Release::Stream(theirs.clone())).unwrap_err()));
            assert!(is_mixed(&buffer.fence(&theirs).unwrap_err()));
            assert!(is_mixed(&buffer.fill_on(&theirs, 0, 1, 1).unwrap_err()));
            assert!(is_mixed(&buffer.copy_from_host_on(&theirs, 0, &[1]).unwrap_err()));
            assert!(is_mixed(&buffer.copy_to_host_on(&theirs, 0, &mut [1]).unwrap_err()));
            let options = Options::new().release(Release::Stream(theirs.clone()));
            assert!(is_mixed(&VirtualMemoryResource::new(&backend.device, options).unwrap_err()));
        });
    });
    // What was refused changed nothing.
    assert!(matches!(buffer.released_after(), Release::DefaultStream));
    require_marks(&buffer, 2, G);
    buffer.close().unwrap();
    drop(theirs);
    other.finish();
}

fn a_buffer_comes_back_from_a_close_on_a_stream_of_another_driver(backend: &Backend) {
    let other = backend.another();
    let theirs = Stream::non_blocking(&other.device);
    let buffer = backend.resource().allocate(G).unwrap();
    write_marks(&buffer, 2);
    let (error, buffer) = backend.require_no_call(|| buffer.close_on(&theirs).unwrap_err().into_parts());
    assert_eq!(error, Error::Driver(driver::Error::DifferentDrivers));
    let buffer = buffer.expect("the buffer");
    require_marks(&buffer, 2, G);
    buffer.close().unwrap();
    drop(theirs);
    other.finish();
}

fn allocations_and_reservations_of_two_drivers_do_not_meet(backend: &Backend) {
    let other = backend.another();
    let size = Reservation::GRANULARITY.round_up(G).unwrap();
    let properties = CUmemAllocationProp::pinned(backend.device.location(), CUmemAllocationHandleType::NONE);
    let allocation = Arc::new(Allocation::create(&backend.driver, size, &properties).unwrap());
    let reservation = Arc::new(Reservation::reserve(&other.driver, size, 0).unwrap());
    let access = CUmemAccessDesc { location: backend.device.location(), flags: CUmemAccess_flags::READWRITE };
    let mixed = handles::Error::Driver(driver::Error::DifferentDrivers);
    other.require_no_call(|| {
        backend.require_no_call(|| {
            let error = Mapping::map(&reservation, 0, Arc::clone(&allocation), Arc::new([access])).unwrap_err();
            assert_eq!(error, mixed);
            let room = reservation.take(0, G).unwrap();
            let error = Mapping::map_in(room, Arc::clone(&allocation), Arc::new([access])).unwrap_err();
            assert_eq!(error, mixed);
        });
    });
    // The room is free again.
    drop(reservation.take(0, G).unwrap());
    drop((allocation, reservation));
    other.finish();
}

fn memory_made_for_no_handle_is_not_exported(backend: &Backend) {
    let resource = backend.resource();
    assert_eq!(resource.handle_kind(), HandleKind::None);
    let buffer = resource.allocate(G).unwrap().grow_into(2 * G).unwrap();
    let shareable = backend.shareable();
    let descriptor = ipc::export(&shareable.allocate(0).unwrap()).unwrap();
    backend.require_no_call(|| {
        let error = ipc::export(&buffer).unwrap_err();
        assert!(matches!(error, ipc::Error::NotExportable { .. }), "{error}");
        assert_eq!(error.code(), None);
        let error = ipc::import(&resource, descriptor).unwrap_err();
        assert!(matches!(error, ipc::Error::WrongHandleKind { .. }), "{error}");
    });
    buffer.close().unwrap();
}

fn chunks_that_make_no_buffer_are_refused_before_any_call(backend: &Backend) {
    let resource = backend.resource();
    let map = |chunks: &[usize], size: usize| {
        let refused = resource.map_chunks::<Error>(chunks, size, |_, _| panic!("an allocation was asked for"));
        refused.unwrap_err()
    };
    backend.require_no_call(|| {
        assert_eq!(map(&[G, 0], G), Error::Chunks { size: G, sum: G });
        assert_eq!(map(&[G], G + 1), Error::Chunks { size: G + 1, sum: G });
        assert_eq!(map(&[G], 0), Error::Chunks { size: 0, sum: G });
        assert_eq!(map(&[], 1), Error::Chunks { size: 1, sum: 0 });
        let odd = map(&[G, G + 4096], G);
        assert_eq!(odd, Error::Handles(handles::Error::NotGranular { bytes: G + 4096, granularity: G }));
        let huge = usize::MAX - (G - 1);
        assert!(matches!(map(&[huge, huge], G), Error::Handles(handles::Error::SizeOverflow { .. })));
    });
}

fn ranges_outside_of_a_reservation_are_refused_before_any_call(backend: &Backend) {
    let size = Reservation::GRANULARITY.round_up(2 * G).unwrap();
    let reservation = Arc::new(Reservation::reserve(&backend.driver, size, 0).unwrap());
    let other = Arc::new(Reservation::reserve(&backend.driver, size, 0).unwrap());
    let properties = CUmemAllocationProp::pinned(backend.device.location(), CUmemAllocationHandleType::NONE);
    let allocation = Arc::new(Allocation::create(&backend.driver, size, &properties).unwrap());
    backend.require_no_call(|| {
        for (offset, bytes) in [(0, 3 * G), (2 * G, G), (G, 2 * G), (usize::MAX, 1), (G, usize::MAX)] {
            let error = reservation.take(offset, bytes).unwrap_err();
            assert_eq!(error, handles::Error::OutOfBounds { offset, size: bytes, reserved: 2 * G });
        }
        // Even where what follows is a reservation of ours as well.
        let error = Mapping::map(&reservation, G, Arc::clone(&allocation), Arc::new([])).unwrap_err();
        assert_eq!(error, handles::Error::OutOfBounds { offset: G, size: 2 * G, reserved: 2 * G });
        assert!(matches!(reservation.take(0, 0), Err(handles::Error::NotGranular { .. })));
        let none = Granularity::new(G).unwrap().round_up(0).unwrap();
        assert!(matches!(Reservation::reserve(&backend.driver, none, 0), Err(handles::Error::NotGranular { .. })));
        let created = Allocation::create(&backend.driver, none, &properties);
        assert!(matches!(created, Err(handles::Error::NotGranular { .. })));
    });
    drop((reservation, other, allocation));
}

fn a_range_that_is_taken_is_refused_before_any_call(backend: &Backend) {
    let size = Reservation::GRANULARITY.round_up(4 * G).unwrap();
    let reservation = Arc::new(Reservation::reserve(&backend.driver, size, 0).unwrap());
    let room = reservation.take(G, 2 * G).unwrap();
    backend.require_no_call(|| {
        for (offset, bytes) in [(G, G), (0, 2 * G), (2 * G, 2 * G), (0, 4 * G), (G + 4096, 4096), (2 * G, G)] {
            let error = reservation.take(offset, bytes).unwrap_err();
            assert_eq!(error, handles::Error::AlreadyMapped { offset, size: bytes });
        }
        let neighbours = (reservation.take(0, G).unwrap(), reservation.take(3 * G, G).unwrap());
        drop(neighbours);
        drop(room);
        drop(reservation.take(0, 4 * G).unwrap());
    });
    drop(reservation);
}

fn an_unknown_attribute_is_told_as_unknown_and_changes_nothing(backend: &Backend) {
    use cuvmm::driver::sys::CUdevice_attribute;
    assert_eq!(backend.device.attribute(CUdevice_attribute(100_000)).unwrap(), None);
    let buffer = backend.resource().allocate(G).unwrap();
    write_marks(&buffer, 4);
    require_marks(&buffer, 4, G);
    buffer.close().unwrap();
}
