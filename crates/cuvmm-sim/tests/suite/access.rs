//! Granting access and using memory: rules R50 to R67, R87 and R88.

use cuvmm_driver::sys::*;
use cuvmm_sim::{Machine, Preset};

use crate::common::{Gpu, UNIT, device_memory, grant, read_write};

const DEVICE: CUmemLocation = CUmemLocation::device(0);
/// A location that no machine has.
const NONSENSE: CUmemLocation = CUmemLocation { location_type: CUmemLocationType::INVALID, id: 0 };

#[test]
fn grants_are_for_whole_mappings_without_holes() {
    for gpu in Gpu::both() {
        let address = gpu.reserve(8 * UNIT, 0, 0).unwrap();
        let handle = gpu.create(2 * UNIT).unwrap();
        for offset in [0, 2, 6] {
            assert_eq!(gpu.map(address + offset * UNIT as u64, 2 * UNIT, handle), 0);
        }
        let wrong = [
            (0, UNIT),
            (1, UNIT),
            (0, 3 * UNIT),
            (0, 64 << 10),
            (4, 2 * UNIT),
            (0, 6 * UNIT),
            (4, 4 * UNIT),
            (0, 0),
            (8, UNIT),
        ];
        for (offset, size) in wrong {
            assert_eq!(gpu.grant(address + offset * UNIT as u64, size, &[read_write(0)]), 1, "{offset} {size:#x}");
        }
        assert_eq!(gpu.access(DEVICE, address), Ok(0), "a failure grants nothing");
        assert_eq!(gpu.grant(address, 4 * UNIT, &[read_write(0)]), 0);
        assert_eq!(gpu.access(DEVICE, address + 4 * UNIT as u64 - 1), Ok(3));
    }
}

#[test]
fn a_lax_driver_grants_up_to_a_hole() {
    for (gpu, code, before) in [(Gpu::strict(), 1, 0), (Gpu::measured(), 0, 3)] {
        let address = gpu.reserve(4 * UNIT, 0, 0).unwrap();
        let handle = gpu.create(UNIT).unwrap();
        let at = |index: usize| address + (index * UNIT) as u64;
        for index in [0, 1, 3] {
            assert_eq!(gpu.map(at(index), UNIT, handle), 0);
        }
        assert_eq!(gpu.grant(address, 4 * UNIT, &[read_write(0)]), code);
        assert_eq!([0, 1, 3].map(|index| gpu.access(DEVICE, at(index))), [Ok(before), Ok(before), Ok(0)]);
    }
}

#[test]
fn a_grant_that_is_refused_leaves_what_came_before_it() {
    let host = CUmemLocation::host_numa(0);
    for gpu in Gpu::both() {
        let address = gpu.reserve(2 * UNIT, 0, 0).unwrap();
        let behind = address + UNIT as u64;
        let memory = CUmemAllocationProp::pinned(host, CUmemAllocationHandleType::NONE);
        assert_eq!(gpu.map(address, UNIT, gpu.create_as(UNIT, &memory).unwrap()), 0);
        assert_eq!(gpu.map(behind, UNIT, gpu.create(UNIT).unwrap()), 0);
        assert_eq!(gpu.grant(address, 2 * UNIT, &[read_write(0), grant(host, 3), grant(DEVICE, 0)]), 801);
        assert_eq!([DEVICE, host].map(|of| gpu.access(of, address)), [Ok(0), Ok(3)]);
        assert_eq!([DEVICE, host].map(|of| gpu.access(of, behind)), [Ok(3), Ok(0)]);
    }
}

#[test]
fn nonsense_grants_are_refused_and_change_nothing() {
    let table = [
        (vec![], 1),
        (vec![grant(DEVICE, 2)], 1),
        (vec![grant(DEVICE, 4)], 1),
        (vec![read_write(99)], 1),
        (vec![read_write(-1)], 1),
        (vec![grant(NONSENSE, 3)], 1),
        (vec![grant(CUmemLocation::host(), 3)], 801),
        (vec![grant(CUmemLocation::host_numa(0), 1)], 801),
        (vec![grant(DEVICE, 1), read_write(99)], 1),
    ];
    for gpu in Gpu::both() {
        let buffer = gpu.buffer(UNIT);
        for (grants, code) in &table {
            assert_eq!(gpu.grant(buffer.address, UNIT, grants), *code, "{grants:?}");
        }
        assert_eq!(gpu.access(DEVICE, buffer.address), Ok(3));
    }
}

#[test]
fn each_grant_replaces_its_locations_and_no_other() {
    for gpu in Gpu::both() {
        let buffer = gpu.buffer(UNIT);
        for flags in [1, 3, 0, 3] {
            assert_eq!(gpu.grant(buffer.address, UNIT, &[grant(DEVICE, flags)]), 0);
            assert_eq!(gpu.access(DEVICE, buffer.address), Ok(flags));
        }
        assert_eq!(gpu.grant(buffer.address, UNIT, &[grant(DEVICE, 3), grant(DEVICE, 1)]), 0);
        assert_eq!(gpu.access(DEVICE, buffer.address), Ok(1), "the last of two counts");
    }
}

#[test]
fn peers_are_granted_where_they_reach() {
    let lonely = Machine::h200_pair();
    let mut unlinked = lonely.clone();
    unlinked.devices[1].peers.clear();
    for preset in [Preset::Strict, Preset::Measured] {
        for (machine, code) in [(lonely.clone(), 0), (unlinked.clone(), 1)] {
            let gpu = Gpu::new(machine.preset(preset));
            let buffer = gpu.buffer(UNIT);
            assert_eq!(gpu.grant(buffer.address, UNIT, &[read_write(1)]), code);
            assert_eq!(gpu.access(DEVICE, buffer.address), Ok(3), "not named, so kept");
            let peer = gpu.access(CUmemLocation::device(1), buffer.address);
            assert_eq!(peer, Ok(if code == 0 { 3 } else { 0 }));
        }
    }
}

#[test]
fn a_granted_peer_uses_the_memory_from_its_own_context() {
    let gpu = Gpu::new(Machine::h200_pair());
    let buffer = gpu.buffer(UNIT);
    gpu.enter(1);
    assert_eq!(gpu.write(buffer.address, b"x"), 1);
    assert_eq!(gpu.grant(buffer.address, UNIT, &[read_write(1)]), 0);
    assert_eq!(gpu.write(buffer.address, b"x"), 0, "without enabling peers");
    gpu.enter(0);
    assert_eq!(gpu.read(buffer.address, 1).unwrap(), b"x");
}

#[test]
fn enabling_a_peer_grants_nothing_and_is_done_once() {
    let gpu = Gpu::new(Machine::h200_pair());
    let first = gpu.enter(0);
    let buffer = gpu.buffer(UNIT);
    let second = gpu.enter(1);
    // SAFETY: numbers alone.
    let enable = |context, flags| unsafe { gpu.raw().cuCtxEnablePeerAccess(context, flags) }.0;
    assert_eq!([enable(first, 1), enable(second, 0), enable(first, 0), enable(first, 0)], [1, 217, 0, 704]);
    assert_eq!(gpu.write(buffer.address, b"x"), 1, "its own grant is what counts");
    assert_eq!(gpu.access(CUmemLocation::device(1), buffer.address), Ok(0));

    let mut strangers = Machine::h200_pair();
    strangers.devices.iter_mut().for_each(|device| device.peers.clear());
    let gpu = Gpu::new(strangers);
    let (first, _) = (gpu.enter(0), gpu.enter(1));
    // SAFETY: numbers alone.
    assert_eq!(unsafe { gpu.raw().cuCtxEnablePeerAccess(first, 0) }.0, 217);
}

#[test]
fn access_is_asked_of_mappings_alone() {
    for gpu in Gpu::both() {
        let buffer = gpu.buffer(UNIT);
        let reserved = gpu.reserve(UNIT, 0, 0).unwrap();
        assert_eq!(gpu.access(DEVICE, buffer.address + UNIT as u64 - 1), Ok(3));
        for address in [0, reserved, buffer.address + UNIT as u64] {
            assert_eq!(gpu.access(DEVICE, address), Err(1));
        }
        assert_eq!(gpu.access(NONSENSE, buffer.address), Err(101));
        assert_eq!(gpu.access(CUmemLocation::device(99), buffer.address), Err(101));
    }
}

#[test]
fn a_lax_driver_tells_the_devices_access_for_the_hosts() {
    for (gpu, told) in [(Gpu::strict(), 0), (Gpu::measured(), 3)] {
        let buffer = gpu.buffer(UNIT);
        assert_eq!(gpu.access(CUmemLocation::host(), buffer.address), Ok(told));
        assert_eq!(gpu.access(CUmemLocation::host_numa(0), buffer.address), Ok(0));
    }
}

#[test]
fn one_grant_across_reservations_is_lax() {
    for (gpu, code) in [(Gpu::strict(), 1), (Gpu::measured(), 0)] {
        let first = gpu.reserve(UNIT, 0, 0).unwrap();
        let second = gpu.reserve(UNIT, 0, first + UNIT as u64).unwrap();
        let handle = gpu.create(UNIT).unwrap();
        assert_eq!([gpu.map(first, UNIT, handle), gpu.map(second, UNIT, handle)], [0, 0]);
        assert_eq!(gpu.grant(first, 2 * UNIT, &[read_write(0)]), code);
    }
}

#[test]
fn copies_and_sets_are_refused_at_once_without_their_grant() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let stream = gpu.stream(CUstream_flags::NON_BLOCKING);
        let buffer = gpu.buffer(UNIT);
        let reserved = gpu.reserve(UNIT, 0, 0).unwrap();
        assert_eq!(gpu.grant(buffer.address, UNIT, &[grant(DEVICE, 1)]), 0);
        assert_eq!(gpu.write(buffer.address, b"x"), 1);
        assert_eq!(gpu.fill(buffer.address, 0, 1, stream), 1);
        assert_eq!(gpu.read(buffer.address, 1).unwrap(), [0xA5], "reading is granted");
        assert_eq!(gpu.grant(buffer.address, UNIT, &[grant(DEVICE, 0)]), 0);
        for address in [buffer.address, reserved, buffer.address + UNIT as u64 - 1] {
            assert_eq!(gpu.read(address, 2), Err(1));
            assert_eq!(gpu.fill(address, 0, 2, stream), 1);
        }
        assert_eq!(gpu.synchronize(stream), 0, "none of it is sticky");
    }
}

#[test]
fn copies_and_sets_span_adjacent_mappings_and_no_hole() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let address = gpu.reserve(4 * UNIT, 0, 0).unwrap();
        for offset in [0, 1, 3] {
            let handle = gpu.create(UNIT).unwrap();
            assert_eq!(gpu.map(address + offset * UNIT as u64, UNIT, handle), 0);
            assert_eq!(gpu.grant(address + offset * UNIT as u64, UNIT, &[read_write(0)]), 0);
        }
        let pattern: Vec<u8> = (0..2 * UNIT).map(|index| (index % 251) as u8).collect();
        assert_eq!(gpu.write(address, &pattern), 0);
        assert!(gpu.read(address, 2 * UNIT).unwrap() == pattern);
        let odd = address + UNIT as u64 - 3;
        assert_eq!(gpu.fill(odd, 7, 6, CUstream::LEGACY), 0);
        assert_eq!(gpu.read(odd - 1, 8).unwrap()[1..7], [7; 6]);
        assert_eq!(gpu.read(address, 3 * UNIT), Err(1));
        assert_eq!(gpu.read(address + UNIT as u64, 2 * UNIT), Err(1));
    }
}

#[test]
fn nothing_of_size_zero_is_touched() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        assert_eq!(gpu.write(0, &[]), 0);
        assert_eq!(gpu.fill(0, 0, 0, CUstream::LEGACY), 0);
        // SAFETY: null is what is asked about.
        let code = unsafe { gpu.raw().cuMemcpyDtoH(std::ptr::null_mut(), CUdeviceptr(gpu.buffer(UNIT).address), 1) };
        assert_eq!(code.0, 1);
    }
}

#[test]
fn wide_sets_are_aligned_and_count_elements() {
    let gpu = Gpu::strict().with_context();
    let buffer = gpu.buffer(UNIT);
    let at = |offset: u64| CUdeviceptr(buffer.address + offset);
    // SAFETY: numbers alone.
    unsafe {
        assert_eq!(gpu.raw().cuMemsetD32(at(2), 1, 1).0, 1);
        assert_eq!(gpu.raw().cuMemsetD16(at(1), 1, 1).0, 1);
        assert_eq!(gpu.raw().cuMemsetD32(at(4), 0x0403_0201, 2).0, 0);
        assert_eq!(gpu.raw().cuMemsetD16(at(12), 0x0605, 1).0, 0);
        assert_eq!(gpu.raw().cuMemsetD32(at(0), 0, usize::MAX).0, 1);
    }
    assert_eq!(gpu.read(buffer.address + 4, 11).unwrap(), [1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 0xA5]);
}

#[test]
fn attributes_describe_the_mapping_and_the_reservation_around_it() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let range = gpu.reserve(3 * UNIT, 0, 0).unwrap();
        let handle = gpu.create_exportable(UNIT);
        let address = range + UNIT as u64;
        assert_eq!(gpu.map(address, UNIT, handle), 0);
        assert_eq!(gpu.map(address + UNIT as u64, UNIT, handle), 0);
        let inside = address + 77;
        let table = [
            (CUpointer_attribute::CONTEXT, 0),
            (CUpointer_attribute::MEMORY_TYPE, 2),
            (CUpointer_attribute::IS_MANAGED, 0),
            (CUpointer_attribute::DEVICE_ORDINAL, 0),
            (CUpointer_attribute::IS_LEGACY_CUDA_IPC_CAPABLE, 0),
            (CUpointer_attribute::RANGE_START_ADDR, range),
            (CUpointer_attribute::RANGE_SIZE, 3 * UNIT as u64),
            (CUpointer_attribute::MAPPED, 1),
            (CUpointer_attribute::ALLOWED_HANDLE_TYPES, 1),
            (CUpointer_attribute::ACCESS_FLAGS, 0),
            (CUpointer_attribute(17), 0),
            (CUpointer_attribute::MAPPING_SIZE, UNIT as u64),
            (CUpointer_attribute::MAPPING_BASE_ADDR, address),
        ];
        for (attribute, value) in table {
            assert_eq!(gpu.attribute(inside, attribute), Ok(value), "{attribute:?}");
            assert_eq!(gpu.attribute(range, attribute), Err(1), "reserved, but not mapped");
        }
        let pointer = CUpointer_attribute::DEVICE_POINTER;
        assert_eq!(gpu.attribute(inside, pointer), Err(1), "nobody was granted access");
        assert_eq!(gpu.attributes(inside, &[pointer, CUpointer_attribute::HOST_POINTER]), (0, vec![0, 0]));
        assert_eq!(gpu.range_of(inside), Err(500));
        assert_eq!(gpu.grant(address, UNIT, &[grant(DEVICE, 1)]), 0);
        assert_eq!(gpu.attribute(inside, pointer), Ok(inside));
        let other = address + UNIT as u64;
        let block = CUpointer_attribute::MEMORY_BLOCK_ID;
        assert_eq!(gpu.attribute(inside, block), gpu.attribute(other, block), "aliases are one block");
        let buffer = CUpointer_attribute::BUFFER_ID;
        assert_ne!(gpu.attribute(inside, buffer), gpu.attribute(other, buffer), "and two mappings");
        assert_eq!(gpu.range_of(inside), Ok((address, UNIT)));
        assert_eq!(gpu.range_of(range), Err(500));
    }
}

#[test]
fn many_attributes_at_once_know_reserved_addresses_and_zero_others() {
    let asked = [
        CUpointer_attribute::RANGE_START_ADDR,
        CUpointer_attribute::RANGE_SIZE,
        CUpointer_attribute::MAPPED,
        CUpointer_attribute::MEMORY_TYPE,
    ];
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let range = gpu.reserve(2 * UNIT, 0, 0).unwrap();
        let handle = gpu.create(UNIT).unwrap();
        assert_eq!(gpu.map(range, UNIT, handle), 0);
        let size = 2 * UNIT as u64;
        let table =
            [(range + 5, [range, size, 1, 2]), (range + UNIT as u64, [range, size, 0, 0]), (0x1234_5000, [0, 0, 0, 0])];
        for (address, expected) in table {
            assert_eq!(gpu.attributes(address, &asked), (0, expected.to_vec()), "{address:#x}");
        }
        let untouched = vec![u64::MAX; 2];
        let unknown = [CUpointer_attribute::MAPPED, CUpointer_attribute(9999)];
        assert_eq!(gpu.attributes(range, &unknown), (1, untouched), "a failure writes nothing");
    }
}

#[test]
fn only_plain_memory_is_capable_of_legacy_sharing() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let capable = CUpointer_attribute::IS_LEGACY_CUDA_IPC_CAPABLE;
        let mut plain = CUdeviceptr(0);
        // SAFETY: the output is a local.
        assert_eq!(unsafe { gpu.raw().cuMemAlloc(&raw mut plain, 1) }.0, 0);
        assert_eq!(gpu.attribute(plain.0, capable), Ok(1));
        assert_eq!(gpu.attribute(gpu.buffer(UNIT).address, capable), Ok(0));
    }
}

#[test]
fn a_look_takes_nothing_for_what_is_not_mapped() {
    let gpu = Gpu::strict();
    let address = gpu.buffer(UNIT).address;
    assert_eq!(gpu.simulator.peek(CUdeviceptr(address), 2).unwrap(), [0xA5; 2]);
    for bytes in [UNIT + 1, 1 << 50, usize::MAX] {
        assert!(gpu.simulator.peek(CUdeviceptr(address), bytes).is_none(), "{bytes:#x}");
    }
    assert!(gpu.simulator.peek(CUdeviceptr(0x1000), usize::MAX >> 1).is_none());
}

#[test]
fn virtual_memory_is_not_plain_memory() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let buffer = gpu.buffer(UNIT);
        // SAFETY: numbers, and the output is a local's.
        unsafe {
            assert_eq!(gpu.raw().cuMemFree(CUdeviceptr(buffer.address)).0, 1);
            assert_eq!(gpu.raw().cuMemFree(CUdeviceptr(0)).0, 0);
            let mut plain = CUdeviceptr(0);
            assert_eq!(gpu.raw().cuMemAlloc(&raw mut plain, 0).0, 1);
            assert_eq!(gpu.raw().cuMemAlloc(&raw mut plain, 100).0, 0);
            assert_eq!(gpu.unmap(plain.0, UNIT), 1);
            assert_eq!(gpu.grant(plain.0, UNIT, &[read_write(0)]), 1);
            assert_eq!(gpu.retain(plain.0), Err(1));
            assert_eq!(gpu.access(DEVICE, plain.0), Ok(0));
            assert_eq!(gpu.range_of(plain.0 + 99), Ok((plain.0, 100)), "what was asked for");
            assert_eq!(gpu.free(plain.0, UNIT), 1);
            assert_eq!(gpu.write(plain.0, b"plain"), 0);
            assert_eq!(gpu.raw().cuMemFree(CUdeviceptr(plain.0 + 1)).0, 1);
            assert_eq!(gpu.raw().cuMemFree(plain).0, 0);
        }
        assert_eq!(gpu.simulator.live().plain_allocations, 0);
    }
}

#[test]
fn host_memory_is_the_hosts_as_far_as_it_is_granted() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let properties = CUmemAllocationProp::pinned(CUmemLocation::host_numa(0), Default::default());
        let handle = gpu.create_as(UNIT, &properties).unwrap();
        let address = gpu.reserve(UNIT, 0, 0).unwrap();
        assert_eq!(gpu.map(address, UNIT, handle), 0);
        assert_eq!(gpu.grant(address, UNIT, &[grant(CUmemLocation::host(), 3), read_write(0)]), 0);
        let bytes: *mut u8 = std::ptr::with_exposed_provenance_mut(address as usize);
        assert_eq!(gpu.write(address, b"device"), 0);
        // SAFETY: the host was granted the memory, and nothing else uses it now.
        unsafe {
            assert_eq!(bytes.read(), b'd');
            bytes.write(b'D');
        }
        assert_eq!(gpu.read(address, 6).unwrap(), b"Device");
        assert_eq!(gpu.grant(address, UNIT, &[grant(CUmemLocation::host(), 1)]), 0);
        // SAFETY: as above, for reading.
        assert_eq!(unsafe { bytes.read() }, b'D');
        assert_eq!(gpu.access(CUmemLocation::host_numa(5), address), Ok(1), "the node is not looked at");
        assert_eq!(gpu.unmap(address, UNIT), 0);
        assert_eq!(gpu.free(address, UNIT), 0);
        assert_eq!(gpu.release(handle), 0);
        assert!(gpu.simulator.live().device_bytes.is_empty() && gpu.simulator.live().host_bytes == 0);
    }
}

#[test]
fn memory_of_one_device_is_not_the_others() {
    let gpu = Gpu::new(Machine::h200_pair());
    gpu.enter(0);
    let handle = gpu.create_as(UNIT, &device_memory(1, Default::default())).unwrap();
    assert_eq!(gpu.simulator.physical_bytes(1), UNIT);
    assert_eq!(gpu.simulator.physical_bytes(0), 0);
    assert_eq!(gpu.release(handle), 0);
}
