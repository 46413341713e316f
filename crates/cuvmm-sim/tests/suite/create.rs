//! Making, retaining and releasing physical memory: rules R23 to R34 and R68 to R73.

use cuvmm_driver::RawDriver;
use cuvmm_driver::sys::*;
use cuvmm_sim::{Machine, NumaNode, Preset};

use crate::common::{Gpu, MIB, UNIT, device_memory};

const NONE: CUmemAllocationHandleType = CUmemAllocationHandleType::NONE;

fn at(location: CUmemLocation, kinds: u32) -> CUmemAllocationProp {
    CUmemAllocationProp::pinned(location, CUmemAllocationHandleType(kinds))
}

#[test]
fn sizes_are_positive_multiples_of_the_granularity() {
    for gpu in Gpu::both() {
        for size in [0, 4096, 64 << 10, 3 * MIB] {
            assert_eq!(gpu.create(size), Err(1), "{size:#x}");
        }
        assert!(gpu.create(3 * UNIT).is_ok());
    }
}

#[test]
fn types_and_locations_are_checked() {
    let typed = |kind| CUmemAllocationProp {
        allocation_type: CUmemAllocationType(kind),
        ..device_memory(0, CUmemAllocationHandleType::NONE)
    };
    let table = [
        (typed(0), 1),
        (typed(2), 1),
        (device_memory(99, NONE), 101),
        (device_memory(-1, NONE), 101),
        (at(CUmemLocation::default(), 0), 1),
        (at(CUmemLocation { location_type: CUmemLocationType::HOST_NUMA_CURRENT, id: 0 }, 0), 1),
        (at(CUmemLocation::host_numa(7), 0), 1),
        (at(CUmemLocation::host_numa(-1), 0), 1),
        (at(CUmemLocation::host(), 1), 1),
    ];
    for gpu in Gpu::both() {
        for (properties, code) in &table {
            assert_eq!(gpu.create_as(UNIT, properties), Err(*code), "{properties:?}");
        }
        assert!(gpu.simulator.live().is_empty());
    }
}

#[test]
fn handle_types_that_cannot_be_had_are_refused() {
    for location in [CUmemLocation::device(0), CUmemLocation::host_numa(0)] {
        for gpu in Gpu::both() {
            for (kinds, code) in [(2, 1), (4, 1), (8, 800), (9, 800)] {
                assert_eq!(gpu.create_as(UNIT, &at(location, kinds)), Err(code), "{kinds}");
            }
            for kinds in [0, 1] {
                assert!(gpu.create_as(UNIT, &at(location, kinds)).is_ok(), "{kinds}");
            }
        }
        assert_eq!(Gpu::strict().create_as(UNIT, &at(location, 16)), Err(801));
        assert!(Gpu::measured().create_as(UNIT, &at(location, 16)).is_ok());
    }
}

#[test]
fn flags_need_the_attribute_that_allows_them() {
    let mut plain = Machine::h200();
    plain.devices[0].attributes.remove(&CUdevice_attribute::GENERIC_COMPRESSION_SUPPORTED.0);
    plain.devices[0].attributes.remove(&CUdevice_attribute::GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED.0);
    let with = |flags| CUmemAllocationProp { alloc_flags: flags, ..device_memory(0, CUmemAllocationHandleType::NONE) };
    let compressed = with(CUmemAllocationPropFlags { compression_type: 1, ..Default::default() });
    let rdma = with(CUmemAllocationPropFlags { gpu_direct_rdma_capable: 1, ..Default::default() });
    let reserved = with(CUmemAllocationPropFlags { reserved: [1, 0, 0, 0], ..Default::default() });
    let (able, unable) = (Gpu::strict(), Gpu::new(plain));
    for properties in [compressed, rdma] {
        let handle = able.create_as(UNIT, &properties).unwrap();
        assert_eq!(able.properties(handle).unwrap().alloc_flags, properties.alloc_flags);
        assert_eq!(unable.create_as(UNIT, &properties), Err(801));
        let node = CUmemAllocationProp { location: CUmemLocation::host_numa(0), ..properties };
        assert_eq!(able.create_as(UNIT, &node), Err(1), "the host's memory has none");
    }
    assert_eq!(able.create_as(UNIT, &reserved), Err(1));
}

#[test]
fn memory_is_counted_by_its_whole_size_and_runs_out() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (free, total) = gpu.memory();
        let half = total / 2 / UNIT * UNIT;
        let handle = gpu.create(half).unwrap();
        assert_eq!(gpu.memory().0, free - half);
        assert_eq!(gpu.create(half + 64 * UNIT), Err(2));
        assert_eq!(gpu.create(1 << 63), Err(2));
        assert!(gpu.create(UNIT).is_ok(), "running out is not sticky");
        assert_eq!(gpu.release(handle), 0);
        assert_eq!(gpu.memory().0, free - UNIT);
    }
}

#[test]
fn memory_goes_with_the_last_of_references_and_mappings_in_any_order() {
    for gpu in Gpu::both() {
        for unmap_first in [true, false] {
            let buffer = gpu.buffer(UNIT);
            assert_eq!(gpu.retain(buffer.address + 4096), Ok(buffer.handle));
            assert_eq!(gpu.release(buffer.handle), 0);
            if unmap_first {
                assert_eq!(gpu.unmap(buffer.address, UNIT), 0);
                assert_eq!(gpu.simulator.physical_bytes(0), UNIT);
                assert_eq!(gpu.release(buffer.handle), 0);
            } else {
                assert_eq!(gpu.release(buffer.handle), 0);
                assert_eq!(gpu.simulator.physical_bytes(0), UNIT);
                assert_eq!(gpu.unmap(buffer.address, UNIT), 0);
            }
            assert_eq!(gpu.simulator.physical_bytes(0), 0);
            assert_eq!(gpu.free(buffer.address, UNIT), 0);
        }
        assert!(gpu.simulator.live().is_empty());
        assert_eq!(gpu.violations(), [""; 0]);
    }
}

#[test]
fn a_retained_reference_has_the_value_of_the_mapping() {
    for gpu in Gpu::both() {
        let buffer = gpu.buffer(UNIT);
        assert_eq!(gpu.retain(buffer.address), Ok(buffer.handle));
        assert_eq!(gpu.simulator.live().allocations, 2);
        assert_eq!(gpu.retain(0), Err(1));
        let reserved = gpu.reserve(UNIT, 0, 0).unwrap();
        assert_eq!(gpu.retain(reserved), Err(1));
        assert_eq!(gpu.retain(buffer.address + UNIT as u64), Err(1));
    }
}

#[test]
fn one_release_too_many_is_a_violation() {
    for gpu in Gpu::both() {
        let handle = gpu.create(UNIT).unwrap();
        assert_eq!(gpu.release(0), 1);
        assert_eq!(gpu.violations(), [""; 0], "0 is refused, and defined");
        assert_eq!(gpu.release(handle), 0);
        for dead in [handle, 0xdead] {
            assert_eq!(gpu.release(dead), 1);
            assert_eq!(gpu.violations().pop().unwrap(), format!("cuMemRelease: handle {dead:#x} is not alive"));
        }
    }
}

#[test]
fn every_use_of_a_dead_handle_is_a_violation() {
    for gpu in Gpu::both() {
        let dead = gpu.create_exportable(UNIT);
        assert_eq!(gpu.release(dead), 0);
        let address = gpu.reserve(UNIT, 0, 0).unwrap();
        assert_eq!(gpu.map(address, UNIT, dead), 1);
        assert_eq!(gpu.export(dead).unwrap_err(), 1);
        let told = gpu.properties(dead).map(|properties| properties.requested_handle_types.0);
        assert_eq!(told, if gpu.simulator.machine().preset == Preset::Strict { Err(1) } else { Ok(1) });
        assert_eq!(gpu.properties(0xdead).unwrap_err(), 1, "it never was");
        assert_eq!(gpu.violations().len(), 4);
    }
}

#[test]
fn a_handle_released_while_mapped_is_dead_and_its_memory_is_not() {
    for (gpu, code) in [(Gpu::strict(), 1), (Gpu::measured(), 0)] {
        let buffer = gpu.buffer_of(gpu.create_exportable(UNIT), UNIT);
        assert_eq!(gpu.release(buffer.handle), 0);
        let other = gpu.reserve(UNIT, 0, 0).unwrap();
        assert_eq!(gpu.map(other, UNIT, buffer.handle), code);
        assert_eq!(gpu.export(buffer.handle).err(), (code > 0).then_some(1));
        assert_eq!(gpu.properties(buffer.handle).err(), (code > 0).then_some(1));
        assert_eq!(gpu.violations().len(), 3, "undefined, whatever the answer");
        assert_eq!(gpu.release(buffer.handle), 1);
        assert_eq!(gpu.retain(buffer.address), Ok(buffer.handle), "it can be had again from the mapping");
        assert_eq!(gpu.release(buffer.handle), 0);
    }
}

#[test]
fn fresh_memory_reads_as_the_machine_poisons_it() {
    for (machine, byte) in [(Machine::h200(), 0xA5), (Machine::h200().poison(None), 0), (Machine::small(), 0xA5)] {
        let gpu = Gpu::new(machine).with_context();
        let buffer = gpu.buffer(8 * MIB);
        let seen = gpu.read(buffer.address, 8 * MIB).unwrap();
        assert!(seen.iter().all(|&seen| seen == byte));
    }
}

#[test]
fn what_was_written_to_freed_memory_is_not_read_from_fresh_memory() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        for _ in 0..3 {
            let buffer = gpu.buffer(UNIT);
            assert!(gpu.read(buffer.address, UNIT).unwrap().iter().all(|&byte| byte == 0xA5));
            assert_eq!(gpu.fill(buffer.address, 0, UNIT, CUstream::LEGACY), 0);
            assert_eq!(gpu.synchronize(CUstream::LEGACY), 0);
            gpu.close(buffer);
        }
    }
}

#[test]
fn granularity_depends_on_the_whole_property_struct() {
    let machine = Machine::h200().granularity(|properties, option| {
        let exportable = properties.requested_handle_types == CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
        let least = if exportable { 4 * MIB } else { 64 << 10 };
        if option == CUmemAllocationGranularity_flags::RECOMMENDED { 2 * least } else { least }
    });
    let gpu = Gpu::new(machine);
    let (plain, exportable) = (device_memory(0, NONE), device_memory(0, CUmemAllocationHandleType(1)));
    assert_eq!(gpu.granularity(&plain, 0), Ok(64 << 10));
    assert_eq!(gpu.granularity(&exportable, 0), Ok(4 * MIB));
    assert_eq!(gpu.granularity(&exportable, 1), Ok(8 * MIB));
    assert_eq!(gpu.granularity(&exportable, 2), Err(1));
    assert!(gpu.create_as(64 << 10, &plain).is_ok());
    assert_eq!(gpu.create_as(2 * MIB, &exportable), Err(1));
    let nonsense = at(CUmemLocation { location_type: CUmemLocationType(77), id: -5 }, 0);
    assert_eq!(Gpu::measured().granularity(&nonsense, 0), Ok(UNIT), "nonsense locations are not refused");
}

#[test]
fn host_memory_follows_version_and_nodes() {
    let host = at(CUmemLocation::host(), 0);
    assert_eq!(Gpu::new(Machine::h200().driver_version(12080)).create_as(UNIT, &host), Err(1));
    let (strict, measured) = (Gpu::strict(), Gpu::measured());
    let location = |gpu: &Gpu| gpu.properties(gpu.create_as(UNIT, &host).unwrap()).unwrap().location;
    assert_eq!(location(&strict), CUmemLocation::host());
    assert_eq!(location(&measured), CUmemLocation::host_numa(0));
    let nodes = [NumaNode { id: 0, memory: 64 * MIB }, NumaNode { id: 2, memory: 0 }];
    let gpu = Gpu::new(Machine::h200().numa_nodes(nodes));
    assert!(gpu.create_as(64 * MIB, &at(CUmemLocation::host_numa(0), 1)).is_ok());
    assert_eq!(gpu.create_as(UNIT, &at(CUmemLocation::host_numa(0), 0)), Err(2));
    assert_eq!(gpu.create_as(UNIT, &at(CUmemLocation::host_numa(2), 0)), Err(2), "a node without memory");
    assert_eq!(gpu.create_as(UNIT, &at(CUmemLocation::host_numa(1), 0)), Err(1), "no such node");
    assert_eq!(gpu.simulator.live().host_bytes, 64 * MIB);
    let without = Gpu::new(Machine::h200().numa_nodes([]));
    assert!(without.create_as(UNIT, &at(CUmemLocation::host_numa(0), 0)).is_ok());
}

#[test]
fn host_memory_goes_to_the_first_node_that_has_any() {
    let nodes = [NumaNode { id: 1, memory: 0 }, NumaNode { id: 3, memory: UNIT }];
    for preset in [Preset::Strict, Preset::Measured] {
        let gpu = Gpu::new(Machine::h200().numa_nodes(nodes).preset(preset));
        let handle = gpu.create_as(UNIT, &at(CUmemLocation::host(), 0)).unwrap();
        let location = gpu.properties(handle).unwrap().location;
        let strict = preset == Preset::Strict;
        assert_eq!(location, if strict { CUmemLocation::host() } else { CUmemLocation::host_numa(3) });
        assert_eq!(gpu.create_as(UNIT, &at(CUmemLocation::host_numa(3), 0)), Err(2), "it is full");
    }
}

#[test]
fn memory_of_a_node_needs_the_attribute_once_there_is_one() {
    let mut machine = Machine::h200();
    machine.devices[0].attributes.insert(141, 0);
    for (version, expected) in [(12080, None), (12090, Some(801)), (13000, Some(801))] {
        let gpu = Gpu::new(machine.clone().driver_version(version));
        assert_eq!(gpu.create_as(UNIT, &at(CUmemLocation::host_numa(0), 1)).err(), expected, "{version}");
    }
}

#[test]
fn usages_are_known_from_some_version_on() {
    for (usage, since) in [(1, 11010), (2, 12080), (4, 13040)] {
        let flags = CUmemAllocationPropFlags { usage, ..Default::default() };
        let properties =
            CUmemAllocationProp { alloc_flags: flags, ..device_memory(0, CUmemAllocationHandleType::NONE) };
        assert!(Gpu::new(Machine::h200().driver_version(since)).create_as(UNIT, &properties).is_ok(), "{usage}");
        if usage > 1 {
            let before = |preset| Gpu::new(Machine::h200().driver_version(since - 10).preset(preset));
            assert_eq!(before(Preset::Strict).create_as(UNIT, &properties), Err(1), "{usage}");
            assert!(before(Preset::Measured).create_as(UNIT, &properties).is_ok(), "{usage}");
        }
    }
}

#[test]
fn null_pointers_are_refused_and_outputs_of_failures_untouched() {
    for gpu in Gpu::both() {
        let raw = gpu.raw();
        let mut handle = CUmemGenericAllocationHandle(7);
        let properties = device_memory(99, CUmemAllocationHandleType::NONE);
        // SAFETY: the pointers are null, or those of locals.
        unsafe {
            assert_eq!(raw.cuMemCreate(std::ptr::null_mut(), UNIT, &raw const properties, 0).0, 1);
            assert_eq!(raw.cuMemCreate(&raw mut handle, UNIT, std::ptr::null(), 0).0, 1);
            assert_eq!(raw.cuMemCreate(&raw mut handle, UNIT, &raw const properties, 0).0, 101);
            assert_eq!(raw.cuMemCreate(&raw mut handle, UNIT, &raw const properties, 1).0, 1);
            assert_eq!(raw.cuMemAddressReserve(std::ptr::null_mut(), UNIT, 0, CUdeviceptr(0), 0).0, 1);
        }
        assert_eq!(handle.0, 7);
        assert!(gpu.simulator.live().is_empty());
        granularity_without_properties(raw);
        assert!(gpu.violations().is_empty());
    }
}

fn granularity_without_properties(raw: &dyn RawDriver) {
    let mut granularity = 0;
    let option = CUmemAllocationGranularity_flags::MINIMUM;
    // SAFETY: the output is ours; null properties are what is asked about.
    let code = unsafe { raw.cuMemGetAllocationGranularity(&raw mut granularity, std::ptr::null(), option) };
    assert_eq!(code.0, 1);
}
