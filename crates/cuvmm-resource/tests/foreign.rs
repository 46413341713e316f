//! Ranges that others made, on machines that not everybody has: old drivers, odd granularities, devices that one has no
//! access to, and drivers that map across reservations.
//!
//! # Safety
//! A range is the test's own, made by raw calls. It is given away once, or not at all where it is refused; no work is on
//! it.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod support;

use cuvmm_driver::Call;
use cuvmm_driver::sys::{
    CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp, CUmemLocation,
};
use cuvmm_resource::{Access, Error, HandleKind, Location, Options, Outcome, Release, VirtualMemoryResource};
use cuvmm_sim::{Machine, Preset};
use support::{Bench, R};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Maps memory of those properties there, and lets go of its handle.
fn map(bench: &Bench, at: CUdeviceptr, bytes: usize, properties: &CUmemAllocationProp) {
    let handle = bench.driver.mem_create(bytes, properties).unwrap();
    // SAFETY: the memory was made just now, and the addresses are the test's.
    unsafe { bench.driver.mem_map(at, bytes, handle) }.unwrap();
    // SAFETY: it is given back once.
    unsafe { bench.driver.mem_release(handle) }.unwrap();
}

/// Memory of `location`, mapped in a reservation of `size` bytes, in pieces of those sizes from its start on.
fn range(bench: &Bench, location: CUmemLocation, pieces: &[usize], size: usize) -> CUdeviceptr {
    let address = bench.driver.mem_address_reserve(size, 32 * MIB, CUdeviceptr(0)).unwrap();
    let properties = CUmemAllocationProp::pinned(location, CUmemAllocationHandleType::NONE);
    let mut offset = 0;
    for bytes in pieces {
        map(bench, address.checked_add(offset).unwrap(), *bytes, &properties);
        offset += bytes;
    }
    address
}

fn of_device(bench: &Bench, pieces: &[usize], size: usize) -> CUdeviceptr {
    range(bench, bench.device().location(), pieces, size)
}

fn grant(bench: &Bench, address: CUdeviceptr, bytes: usize, access: &[CUmemAccessDesc]) {
    // SAFETY: the mapping is the test's, and no work is on it.
    unsafe { bench.driver.mem_set_access(address, bytes, access) }.unwrap();
}

fn take_down(bench: &Bench, address: CUdeviceptr, pieces: &[usize], size: usize) {
    let mut at = address;
    for bytes in pieces {
        // SAFETY: the mapping is the test's, and no work is on it.
        unsafe { bench.driver.mem_unmap(at, *bytes) }.unwrap();
        at = at.checked_add(*bytes).unwrap();
    }
    // SAFETY: nothing is mapped there any more.
    unsafe { bench.driver.mem_address_free(address, size) }.unwrap();
}

#[test]
fn a_driver_that_does_not_tell_where_mappings_end_is_too_old() {
    for version in [11000, 11020, 11060] {
        let bench = Bench::new(Machine::small().driver_version(version));
        let resource = bench.plain();
        let address = of_device(&bench, &[R], 2 * R);
        assert!(resource.is_vmm(address).unwrap(), "that is told since 11.0");
        bench.simulator.clear_calls();
        let what = "telling where a mapping ends, which came with CUDA 11.7";
        let old = Error::Unsupported { what, ordinal: 0 };
        // SAFETY: it is refused.
        assert_eq!(unsafe { resource.from_raw(address, 2 * R, Release::Caller) }.unwrap_err(), old);
        // SAFETY: as above.
        let refused = unsafe { resource.deallocate(address, 2 * R, Release::Caller) }.unwrap_err();
        assert_eq!((refused.error(), refused.is_deallocated()), (&old, false));
        // SAFETY: as above.
        assert_eq!(unsafe { resource.wrap(address, R) }.unwrap_err(), old);
        bench.assert_no_call();
        take_down(&bench, address, &[R], 2 * R);
        bench.assert_clean();
    }
    for version in [11070, 12000] {
        let bench = Bench::new(Machine::small().driver_version(version));
        let address = of_device(&bench, &[R], 2 * R);
        // SAFETY: the range is the test's to give away.
        unsafe { bench.plain().from_raw(address, 2 * R, Release::Caller) }.unwrap().close().unwrap();
        bench.assert_clean();
    }
}

#[test]
fn chunks_are_what_the_resource_can_have_as_chunks() {
    // 1 MiB for what is not shared, 2 MiB for what is.
    let bench = Bench::new(Machine::odd());
    let fine = bench.plain();
    let coarse = bench.resource(Options::new().handle_kind(HandleKind::PosixFd));
    assert_eq!((fine.granularity().bytes(), coarse.granularity().bytes()), (MIB, 2 * MIB));
    let pieces = [MIB, 2 * MIB, 3 * MIB];
    let address = of_device(&bench, &pieces, 64 * MIB);
    let before = bench.simulator.live();
    let odd = Error::Handles(cuvmm_handles::Error::NotGranular { bytes: MIB, granularity: 2 * MIB });
    // SAFETY: it is refused.
    assert_eq!(unsafe { coarse.from_raw(address, 64 * MIB, Release::Caller) }.unwrap_err(), odd);
    // SAFETY: as above.
    assert_eq!(unsafe { coarse.wrap(address, 6 * MIB) }.unwrap_err(), odd);
    assert_eq!(bench.simulator.live(), before);

    // SAFETY: the range is the test's to give away.
    let buffer = unsafe { fine.from_raw(address, 64 * MIB, Release::Caller) }.unwrap();
    assert_eq!((buffer.size(), buffer.capacity()), (6 * MIB, 64 * MIB));
    let grown = buffer.grow_into(7 * MIB).unwrap();
    assert_eq!((grown.outcome(), grown.address(), grown.size()), (Some(Outcome::InPlace), address, 7 * MIB));
    let behind = address.checked_add(64 * MIB).unwrap();
    let taken = bench.driver.mem_address_reserve(32 * MIB, 0, behind);
    let moved = grown.grow_into(65 * MIB).unwrap();
    assert_eq!((moved.outcome(), moved.chunks().len()), (Some(Outcome::Moved), pieces.len() + 2));
    drop(moved);
    if let Ok(taken) = taken {
        take_down(&bench, taken, &[], 32 * MIB);
    }
    bench.assert_clean();
}

#[test]
fn a_mapping_in_any_granule_behind_the_first_hole_is_found() {
    for (machine, granularity) in [(Machine::small(), 64 * KIB), (Machine::odd(), MIB), (Machine::h200(), 2 * MIB)] {
        let bench = Bench::new(machine);
        let resource = bench.plain();
        let properties = CUmemAllocationProp::pinned(bench.device().location(), CUmemAllocationHandleType::NONE);
        let size = 8 * granularity.max(R);
        for offset in (2 * granularity..size).step_by(granularity) {
            let address = of_device(&bench, &[granularity], size);
            let behind = address.checked_add(offset).unwrap();
            map(&bench, behind, granularity, &properties);
            // SAFETY: it is refused.
            let refused = unsafe { resource.from_raw(address, size, Release::Caller) }.unwrap_err();
            assert_eq!(refused, Error::MappedBehindHole { address: behind });
            // SAFETY: the mapping is the test's, and no work is on it.
            unsafe { bench.driver.mem_unmap(behind, granularity) }.unwrap();
            take_down(&bench, address, &[granularity], size);
        }
        bench.assert_clean();
    }
}

/// Drivers let a mapping reach out of its reservation into the next.
#[test]
fn a_mapping_across_an_end_is_refused() {
    let bench = Bench::new(Machine::small().preset(Preset::Measured));
    let resource = bench.plain();
    let first = bench.driver.mem_address_reserve(2 * R, 0, CUdeviceptr(0)).unwrap();
    let second = first.checked_add(2 * R).unwrap();
    assert_eq!(bench.driver.mem_address_reserve(2 * R, 0, second).unwrap(), second);
    let properties = CUmemAllocationProp::pinned(bench.device().location(), CUmemAllocationHandleType::NONE);
    let middle = first.checked_add(R).unwrap();
    map(&bench, first, R, &properties);
    map(&bench, middle, 2 * R, &properties);
    let across = Error::MappingAcross { address: middle, size: 2 * R as u64 };
    for address in [first, second] {
        // SAFETY: it is refused.
        assert_eq!(unsafe { resource.from_raw(address, 2 * R, Release::Caller) }.unwrap_err(), across);
        // SAFETY: as above.
        let refused = unsafe { resource.deallocate(address, 2 * R, Release::Caller) }.unwrap_err();
        assert_eq!((refused.error(), refused.is_deallocated()), (&across, false));
    }
    // It is whole mappings all the same.
    // SAFETY: the memory is the test's, which refers to nothing in it.
    unsafe { resource.wrap(first, 3 * R) }.unwrap().close().unwrap();
    // SAFETY: the mapping is the test's, and no work is on it.
    unsafe { bench.driver.mem_unmap(middle, 2 * R) }.unwrap();
    take_down(&bench, first, &[R], 2 * R);
    take_down(&bench, second, &[], 2 * R);
    bench.assert_clean();
}

#[test]
fn every_device_that_was_granted_a_chunk_has_it_wherever_that_moves() {
    let bench = Bench::new(Machine::odd());
    let devices = bench.driver.devices();
    let desc = |ordinal: usize, flags| CUmemAccessDesc { location: devices[ordinal].location(), flags };
    // Device 2 reaches no other; memory of the host reaches everybody.
    let node = CUmemLocation::host_numa(1);
    let of_host = bench.resource(Options::new().location(Location::HostNuma(1)));
    for (resource, location, grants) in [
        (bench.plain(), devices[0].location(), vec![desc(1, CUmemAccess_flags::READ)]),
        (of_host, node, vec![desc(1, CUmemAccess_flags::READ), desc(2, CUmemAccess_flags::READWRITE)]),
    ] {
        let address = range(&bench, location, &[32 * MIB], 32 * MIB);
        grant(&bench, address, 32 * MIB, &grants);
        // SAFETY: the range is the test's to give away.
        let buffer = unsafe { resource.from_raw(address, 32 * MIB, Release::Caller) }.unwrap();
        assert_eq!(buffer.chunks()[0].access, grants);
        let moved = buffer.grow_into(2048 * MIB).unwrap();
        assert_eq!(moved.chunks()[0].access, grants);
        for (device, flags) in devices.iter().map(|device| {
            let granted = grants.iter().find(|granted| granted.location == device.location());
            (device, granted.map_or(CUmemAccess_flags::NONE, |granted| granted.flags))
        }) {
            assert_eq!(bench.driver.mem_get_access(device.location(), moved.address()).unwrap(), flags);
        }
        drop(moved);
    }
    bench.assert_clean();
}

#[test]
fn memory_of_the_host_is_known_by_whatever_node_the_driver_names() {
    for bench in Bench::presets() {
        let resource = bench.resource(Options::new().location(Location::Host));
        let address = range(&bench, CUmemLocation::host(), &[2 * MIB], 32 * MIB);
        // SAFETY: the range is the test's to share and to give away.
        unsafe { resource.wrap(address, 2 * MIB) }.unwrap().close().unwrap();
        // SAFETY: as above.
        unsafe { resource.deallocate(address, 32 * MIB, Release::Caller) }.unwrap();
        bench.assert_clean();
    }
}

#[test]
fn memory_of_the_host_is_told_from_that_of_another_node() {
    let bench = Bench::new(Machine::h200());
    let anywhere = bench.resource(Options::new().location(Location::Host));
    let of_node = bench.resource(Options::new().location(Location::HostNuma(0)));
    let deallocate = |resource: &VirtualMemoryResource, address| {
        // SAFETY: the range is the test's to give away.
        unsafe { resource.deallocate(address, 32 * MIB, Release::DefaultStream) }
    };
    let address = range(&bench, CUmemLocation::host(), &[2 * MIB], 32 * MIB);
    let refused = deallocate(&of_node, address).unwrap_err();
    let other = Error::OtherLocation { address, location: CUmemLocation::host() };
    assert_eq!((refused.error(), refused.is_deallocated()), (&other, false));
    bench.simulator.clear_calls();
    deallocate(&anywhere, address).unwrap();
    for resource in [&of_node, &anywhere] {
        deallocate(resource, range(&bench, CUmemLocation::host_numa(0), &[2 * MIB], 32 * MIB)).unwrap();
    }
    assert_eq!(bench.count(Call::cuDevicePrimaryCtxRetain), 0, "there is nothing to wait for");
    // So is memory of another device.
    let pair = Bench::new(Machine::h200_pair());
    let [first, second] = [0, 1].map(|ordinal| pair.driver.device(ordinal).unwrap());
    let resource = VirtualMemoryResource::new(&first, Options::new().peer(&second, Access::ReadWrite)).unwrap();
    let address = range(&pair, second.location(), &[2 * MIB], 32 * MIB);
    let refused = deallocate(&resource, address).unwrap_err();
    assert_eq!(refused.error(), &Error::OtherLocation { address, location: second.location() });
    deallocate(&VirtualMemoryResource::new(&second, Options::new()).unwrap(), address).unwrap();
    pair.assert_clean();
    bench.assert_clean();
}
