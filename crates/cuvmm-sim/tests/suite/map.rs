//! Mapping and unmapping: rules R35 to R49.

use cuvmm_driver::sys::CUmemLocation;
use cuvmm_sim::{Machine, Preset};

use crate::common::{Gpu, MIB, UNIT, device_memory};

#[test]
fn a_whole_allocation_is_mapped_or_nothing() {
    for gpu in Gpu::both() {
        let address = gpu.reserve(4 * UNIT, 0, 0).unwrap();
        let handle = gpu.create(2 * UNIT).unwrap();
        // Size, offset, flags, and the code.
        let table = [
            (UNIT, 0, 0, 801),
            (4 * UNIT, 0, 0, 801),
            (UNIT, UNIT, 0, 801),
            (2 * UNIT, UNIT, 0, 801),
            (0, 0, 0, 1),
            (2 * UNIT, 0, 1, 1),
        ];
        for (size, offset, flags, code) in table {
            assert_eq!(gpu.map_with(address, size, offset, handle, flags), code, "{size:#x} {offset:#x} {flags}");
        }
        assert_eq!(gpu.simulator.live().mappings, 0);
        assert_eq!(gpu.map(address, 2 * UNIT, handle), 0);
    }
}

#[test]
fn where_it_is_mapped_must_be_reserved_free_and_aligned() {
    for gpu in Gpu::both() {
        let address = gpu.reserve(4 * UNIT, 0, 0).unwrap();
        let handle = gpu.create(UNIT).unwrap();
        assert_eq!(gpu.map(address + UNIT as u64, UNIT, handle), 0);
        let elsewhere = address + (1 << 30);
        for wrong in [0, address + (64 << 10), address + MIB as u64, address + UNIT as u64, elsewhere] {
            assert_eq!(gpu.map(wrong, UNIT, handle), 1, "{:#x}", wrong.wrapping_sub(address));
        }
        let long = gpu.create(2 * UNIT).unwrap();
        assert_eq!(gpu.map(address, 2 * UNIT, long), 1, "it would run into the mapping");
        assert_eq!(gpu.map(address, UNIT, 0), 1);
        assert_eq!(gpu.simulator.live().mappings, 1);
    }
}

#[test]
fn the_end_of_a_reservation_is_an_end_in_strict_alone() {
    for (gpu, code) in [(Gpu::strict(), 1), (Gpu::measured(), 0)] {
        let address = gpu.reserve(UNIT, 0, 0).unwrap();
        let handle = gpu.create(2 * UNIT).unwrap();
        assert_eq!(gpu.map(address, 2 * UNIT, handle), code);
        if code == 0 {
            assert_eq!(gpu.free(address, UNIT), 1);
            assert_eq!(gpu.unmap(address, 2 * UNIT), 0);
        }
        assert_eq!(gpu.free(address, UNIT), 0);
    }
}

#[test]
fn two_adjacent_reservations_stay_two_in_strict_alone() {
    for (gpu, code) in [(Gpu::strict(), 1), (Gpu::measured(), 0)] {
        let first = gpu.reserve(UNIT, 0, 0).unwrap();
        let second = gpu.reserve(UNIT, 0, first + UNIT as u64).unwrap();
        let handle = gpu.create(2 * UNIT).unwrap();
        assert_eq!(gpu.map(first, 2 * UNIT, handle), code);
        if code == 0 {
            assert_eq!([gpu.free(first, UNIT), gpu.free(second, UNIT)], [1, 1]);
            assert_eq!(gpu.unmap(first, 2 * UNIT), 0);
        }
        assert_eq!([gpu.free(first, UNIT), gpu.free(second, UNIT)], [0, 0]);
    }
}

#[test]
fn aliases_share_bytes_and_grants_are_each_ones_own() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let one = gpu.buffer(UNIT);
        let two = gpu.buffer_of(one.handle, UNIT);
        assert_eq!(gpu.write(one.address + 5, b"shared"), 0);
        assert_eq!(gpu.read(two.address + 5, 6).unwrap(), b"shared");
        let third = gpu.reserve(UNIT, 0, 0).unwrap();
        assert_eq!(gpu.map(third, UNIT, one.handle), 0);
        assert_eq!(gpu.access(CUmemLocation::device(0), third), Ok(0), "a new mapping grants nothing");
        assert_eq!(gpu.simulator.live().mappings, 3);
        assert_eq!(gpu.simulator.physical_bytes(0), UNIT);
    }
}

#[test]
fn part_of_a_mapping_is_never_unmapped() {
    for gpu in Gpu::both() {
        let address = gpu.reserve(4 * UNIT, 0, 0).unwrap();
        let handle = gpu.create(2 * UNIT).unwrap();
        assert_eq!(gpu.map(address, 2 * UNIT, handle), 0);
        assert_eq!(gpu.map(address + 2 * UNIT as u64, 2 * UNIT, handle), 0);
        let parts = [(0, UNIT), (UNIT, UNIT), (0, 3 * UNIT), (UNIT, 3 * UNIT), (0, 0), (0, 64 << 10)];
        for (offset, size) in parts {
            assert_eq!(gpu.unmap(address + offset as u64, size), 1, "{offset:#x} {size:#x}");
        }
        assert_eq!(gpu.simulator.live().mappings, 2, "nothing is unmapped by a failure");
        assert_eq!(gpu.unmap(address, 4 * UNIT), 0, "several at once are");
        assert_eq!(gpu.simulator.live().mappings, 0);
    }
}

#[test]
fn holes_are_unmapped_by_a_lax_driver_alone() {
    for (gpu, code) in [(Gpu::strict(), 1), (Gpu::measured(), 0)] {
        let address = gpu.reserve(4 * UNIT, 0, 0).unwrap();
        let handle = gpu.create(UNIT).unwrap();
        assert_eq!(gpu.unmap(address, UNIT), code, "never mapped");
        assert_eq!(gpu.unmap(address, 64 << 10), code);
        assert_eq!(gpu.map(address, UNIT, handle), 0);
        assert_eq!(gpu.map(address + 2 * UNIT as u64, UNIT, handle), 0);
        assert_eq!(gpu.unmap(address, 3 * UNIT), code);
        assert_eq!(gpu.simulator.live().mappings, if code == 0 { 0 } else { 2 });
    }
}

#[test]
fn what_is_not_reserved_is_not_unmapped() {
    for gpu in Gpu::both() {
        let address = gpu.reserve(UNIT, 0, 0).unwrap();
        assert_eq!(gpu.unmap(address + (1 << 30), UNIT), 1);
        assert_eq!(gpu.unmap(0, 0), 1);
        assert_eq!(gpu.unmap(0, UNIT), 1);
        assert_eq!(gpu.unmap(u64::MAX - 4096, UNIT), 1);
    }
}

#[test]
fn an_unmap_by_a_lax_driver_goes_past_its_reservation() {
    for (gpu, code) in [(Gpu::strict(), 1), (Gpu::measured(), 0)] {
        let address = gpu.reserve(UNIT, 0, 0).unwrap();
        assert_eq!(gpu.map(address, UNIT, gpu.create(UNIT).unwrap()), 0);
        assert_eq!(gpu.unmap(address, usize::MAX - UNIT + 1), code);
        assert_eq!(gpu.simulator.live().mappings, 1, "its end is before its start");
        assert_eq!(gpu.unmap(address, 8 * UNIT), code);
        assert_eq!(gpu.simulator.live().mappings, code as usize);
    }
}

#[test]
fn one_unmap_across_reservations_is_lax() {
    for (gpu, code) in [(Gpu::strict(), 1), (Gpu::measured(), 0)] {
        let first = gpu.reserve(UNIT, 0, 0).unwrap();
        let second = gpu.reserve(UNIT, 0, first + UNIT as u64).unwrap();
        let handle = gpu.create(UNIT).unwrap();
        assert_eq!([gpu.map(first, UNIT, handle), gpu.map(second, UNIT, handle)], [0, 0]);
        assert_eq!(gpu.unmap(first, 2 * UNIT), code);
    }
}

#[test]
fn a_mapping_made_again_begins_without_grants() {
    for gpu in Gpu::both() {
        let buffer = gpu.buffer(UNIT);
        assert_eq!(gpu.unmap(buffer.address, UNIT), 0);
        assert!(!gpu.simulator.is_mapped(buffer.address.into_device()));
        assert_eq!(gpu.map(buffer.address, UNIT, buffer.handle), 0);
        assert_eq!(gpu.access(CUmemLocation::device(0), buffer.address), Ok(0));
    }
}

#[test]
fn no_call_needs_or_makes_a_context() {
    for gpu in Gpu::both() {
        let buffer = gpu.buffer(UNIT);
        gpu.close(buffer);
        assert_eq!(gpu.current(), Ok(0));
        assert!(!gpu.is_active(0));
    }
}

#[test]
fn a_map_that_fails_leaves_the_range_reserved_and_empty() {
    for gpu in Gpu::both() {
        let address = gpu.reserve(2 * UNIT, 0, 0).unwrap();
        let (handle, long) = (gpu.create(UNIT).unwrap(), gpu.create(2 * UNIT).unwrap());
        assert_eq!(gpu.map(address + UNIT as u64, UNIT, handle), 0);
        for (size, handle) in [(2 * UNIT, long), (UNIT, long), (UNIT, 0)] {
            assert_ne!(gpu.map(address, size, handle), 0);
            assert_eq!((gpu.retain(address), gpu.access(CUmemLocation::device(0), address)), (Err(1), Err(1)));
        }
        assert_eq!(gpu.map(address, UNIT, handle), 0);
    }
}

#[test]
fn memory_of_several_devices_lies_side_by_side() {
    for preset in [Preset::Strict, Preset::Measured] {
        let gpu = Gpu::new(Machine::h200_pair().preset(preset));
        let address = gpu.reserve(2 * UNIT, 0, 0).unwrap();
        for (index, device) in [(0, 1), (1, 0)] {
            let memory = device_memory(device, Default::default());
            let handle = gpu.create_as(UNIT, &memory).unwrap();
            assert_eq!(gpu.map(address + index * UNIT as u64, UNIT, handle), 0);
            assert_eq!(gpu.release(handle), 0);
        }
        assert_eq!(gpu.simulator.live().device_bytes, [(0, UNIT), (1, UNIT)].into());
        assert_eq!(gpu.unmap(address, 2 * UNIT), 0);
        assert!(gpu.simulator.live().device_bytes.is_empty());
    }
}

/// An address as the driver's type.
trait IntoDevice {
    fn into_device(self) -> cuvmm_driver::sys::CUdeviceptr;
}

impl IntoDevice for u64 {
    fn into_device(self) -> cuvmm_driver::sys::CUdeviceptr {
        cuvmm_driver::sys::CUdeviceptr(self)
    }
}
