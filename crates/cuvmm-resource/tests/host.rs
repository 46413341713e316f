//! Memory of the host on machines that are not as they should be, and what reaches the driver of it.
//!
//! # Safety
//! Hooks read and write what a call was given, while it is made, and what it just granted to the host; slices are made
//! where nobody else has the memory.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use cuvmm_driver::sys::{CUmemAccessDesc, CUmemAllocationProp, CUmemLocation, CUmemLocationType};
use cuvmm_driver::{CUresult, Call, Driver, Failure, Hook, Hooked, Invocation};
use cuvmm_handles::Allocation;
use cuvmm_resource::{Access, Error, GrowOptions, HandleKind, Location, Options, Outcome, VirtualMemoryResource};
use cuvmm_sim::{Hints, Machine, Preset, Simulator};
use support::{Bench, G, R};

fn on(location: Location) -> Options {
    Options::new().location(location)
}

/// Memory of the host that no device may touch.
fn host_alone() -> Options {
    on(Location::HostNuma(0)).own_access(Access::None)
}

/// The places that calls name, of memory and of those who are to have access.
#[derive(Clone, Default)]
struct Places {
    named: Arc<Mutex<Vec<CUmemLocation>>>,
    /// Whether no device is to have access to anything.
    refuses_devices: Arc<AtomicBool>,
    /// Whether what was granted is written all over.
    soils: Arc<AtomicBool>,
}

impl Places {
    fn device(&self, machine: Machine) -> (Simulator, Driver) {
        let simulator = Simulator::new(machine);
        let driver = Driver::new(Hooked::new(simulator.clone(), self.clone())).unwrap();
        (simulator, driver)
    }
}

/// Who is granted something by a call.
fn grants(invocation: &Invocation<'_>) -> Vec<CUmemAccessDesc> {
    let (first, count) = (invocation.arguments[2] as usize, invocation.arguments[3] as usize);
    // SAFETY: the call is under way, and its third and fourth arguments are a list.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(first), count) }.to_vec()
}

impl Hook for Places {
    fn before(&self, invocation: &Invocation<'_>) -> Option<Failure> {
        let memory = |argument: usize| {
            let properties = invocation.arguments[argument] as usize;
            // SAFETY: the call is under way, and this argument points to properties.
            unsafe { std::ptr::with_exposed_provenance::<CUmemAllocationProp>(properties).read() }.location
        };
        let mut named = self.named.lock().unwrap();
        match invocation.call {
            Call::cuMemCreate => named.push(memory(2)),
            Call::cuMemGetAllocationGranularity => named.push(memory(1)),
            Call::cuMemSetAccess => {
                let to = grants(invocation);
                named.extend(to.iter().map(|desc| desc.location));
                let is_device = |desc: &CUmemAccessDesc| desc.location.location_type == CUmemLocationType::DEVICE;
                if self.refuses_devices.load(Ordering::Relaxed) && to.iter().any(is_device) {
                    return Failure::new(CUresult::NOT_SUPPORTED);
                }
            }
            _ => {}
        }
        None
    }

    fn after(&self, invocation: &Invocation<'_>, result: CUresult) -> Option<Failure> {
        if invocation.call == Call::cuMemSetAccess && result.is_success() && self.soils.load(Ordering::Relaxed) {
            let address = std::ptr::with_exposed_provenance_mut::<u8>(invocation.arguments[0] as usize);
            // SAFETY: the host was granted this memory just now, and nobody else knows of it.
            unsafe { address.write_bytes(0xA5, invocation.arguments[1] as usize) };
        }
        None
    }
}

#[test]
fn the_current_node_is_named_to_the_driver_by_its_number() {
    for preset in [Preset::Strict, Preset::Measured] {
        let places = Places::default();
        let (simulator, driver) = places.device(Machine::small().preset(preset).without_numa());
        let resource = VirtualMemoryResource::new(&driver.device(0).unwrap(), on(Location::HostNumaCurrent));
        // On a host whose system has more nodes than the simulated one, the current one may be another.
        let node = match resource {
            Ok(resource) => {
                let Location::HostNuma(node) = resource.location() else { panic!("{:?}", resource.location()) };
                resource.allocate(G).unwrap().grow_into(R).unwrap().fill(0, R, 1).unwrap();
                node
            }
            Err(Error::NumaNodeRefused { node, .. }) => node,
            Err(error) => panic!("{error}"),
        };
        let named = places.named.lock().unwrap();
        assert!(named.contains(&CUmemLocation::host_numa(node)));
        let other =
            named.iter().find(|place| ![CUmemLocation::host_numa(node), CUmemLocation::device(0)].contains(place));
        assert_eq!(other, None);
        assert!(simulator.live().is_empty());
    }
}

#[test]
fn a_device_that_does_not_reach_the_memory_is_named() {
    let places = Places::default();
    let (simulator, driver) = places.device(Machine::small());
    let device = driver.device(0).unwrap();
    places.refuses_devices.store(true, Ordering::Relaxed);
    for location in [Location::Host, Location::HostNuma(0)] {
        let error = VirtualMemoryResource::new(&device, on(location)).unwrap_err();
        let Error::AccessRefused { location: refused, .. } = &error else { panic!("{error:?}") };
        assert_eq!((*refused, error.code()), (Some(CUmemLocation::device(0)), Some(CUresult::NOT_SUPPORTED)));
        assert!(error.to_string().ends_with(", to device 0"), "{error}");
        // Without it there is memory.
        VirtualMemoryResource::new(&device, on(location).own_access(Access::None)).unwrap();
    }
    assert!(simulator.live().is_empty());
}

#[test]
fn a_machine_without_memory_of_the_host_says_so() {
    let mut machine = Machine::small();
    machine.devices[0].attributes.insert(141, 0);
    machine.devices[0].attributes.insert(145, 0);
    let bench = Bench::new(machine);
    for location in [Location::Host, Location::HostNuma(0), Location::HostNumaCurrent] {
        let error = VirtualMemoryResource::new(&bench.device(), on(location)).unwrap_err();
        assert!(matches!(error, Error::Unsupported { ordinal: 0, .. }), "{error:?}");
    }
    assert_eq!(bench.count(Call::cuMemCreate), 0);
    // Its nodes can do without NUMA, and its drivers without the attribute.
    for machine in [Machine::small().without_numa(), Machine::small().driver_version(12040)] {
        let bench = Bench::new(machine);
        let buffer = bench.resource(host_alone()).allocate(1).unwrap();
        buffer.fill(0, 1, 1).unwrap();
        drop(buffer);
        bench.assert_clean();
    }
}

/// Memory that somebody wrote to before it is zeroed, over several chunks and their ends.
#[test]
fn zeroed_memory_is_zero_whatever_it_was() {
    let places = Places::default();
    let (simulator, driver) = places.device(Machine::small());
    let device = driver.device(0).unwrap();
    places.soils.store(true, Ordering::Relaxed);
    for options in [host_alone(), on(Location::Host)] {
        let resource = VirtualMemoryResource::new(&device, options.max_chunk(2 * G)).unwrap();
        let is_all = |bytes: &[u8], value: u8| bytes.iter().all(|byte| *byte == value);
        let bytes_of = |buffer: &cuvmm_resource::VirtualMemoryBuffer| {
            let mut bytes = vec![1; buffer.size()];
            buffer.copy_to_host(0, &mut bytes).unwrap();
            bytes
        };
        assert!(is_all(&bytes_of(&resource.allocate(3 * G).unwrap()), 0xA5), "the test soils nothing");
        simulator.clear_calls();
        let buffer = resource.allocate_zeroed(5 * G).unwrap();
        let calls = simulator.calls();
        assert_eq!((buffer.chunks().len(), calls.len()), (3, 1 + 3 * 3), "{calls:?}");
        assert!(is_all(&bytes_of(&buffer), 0));
        buffer.fill(1, 5 * G - 1, 7).unwrap();
        let grown = buffer.grow_with(40 * G, &GrowOptions::new().zeroed()).unwrap();
        let bytes = bytes_of(&grown);
        assert!(bytes[0] == 0 && is_all(&bytes[1..5 * G], 7) && is_all(&bytes[5 * G..], 0));
        let beyond = resource.allocate_zeroed_with_capacity(G, 8 * G).unwrap();
        assert!(is_all(&bytes_of(&beyond), 0));
    }
    assert!(simulator.live().is_empty());
    assert_eq!(simulator.violations(), []);
}

/// Memory that comes from elsewhere is touched by the host as well: nobody may take a device's for it.
#[test]
fn memory_of_a_device_is_never_taken_for_the_hosts() {
    for bench in Bench::presets() {
        let resource = bench.resource(on(Location::HostNuma(0)));
        let memory = |size, location| {
            Allocation::create(
                &bench.driver,
                size,
                &CUmemAllocationProp::pinned(location, HandleKind::None.as_driver()),
            )
        };
        bench.simulator.clear_calls();
        let refused = resource.map_chunks(&[G, G], 2 * G, |chunk, size| {
            let places = [CUmemLocation::host_numa(0), CUmemLocation::device(0)];
            Ok::<_, Error>(memory(size, places[chunk])?)
        });
        assert_eq!(refused.map(drop), Err(Error::ChunkMismatch { what: "location" }));
        assert_eq!(bench.count(Call::cuMemMap), 1, "the first chunk alone");

        for place in [CUmemLocation::host(), CUmemLocation::host_numa(0)] {
            let buffer =
                resource.map_chunks(&[G, 2 * G], 3 * G, |_, size| Ok::<_, Error>(memory(size, place)?)).unwrap();
            buffer.fill(G - 3, 6, 9).unwrap();
            assert_eq!(bench.bytes_of(&buffer)[G - 4..G + 4], [0, 9, 9, 9, 9, 9, 9, 0]);
        }
        // Who asks what it is may be refused, too.
        bench.faults.fail(Call::cuMemGetAllocationPropertiesFromHandle, 1, CUresult::UNKNOWN, cuvmm_sim::When::Before);
        let place = CUmemLocation::host();
        let error = resource.map_chunks(&[G], G, |_, size| Ok::<_, Error>(memory(size, place)?)).unwrap_err();
        assert_eq!(error.call(), Some(Call::cuMemGetAllocationPropertiesFromHandle));
        bench.assert_clean();
    }
}

/// The chunks of a buffer need not be granted to the same devices, but all of them are the host's.
#[test]
fn every_chunk_is_the_hosts_and_each_has_its_own_devices() {
    for hints in [Hints::Granted, Hints::Refused(CUresult::INVALID_VALUE)] {
        let bench = Bench::new(Machine::small().hints(hints));
        let [both, reads, alone] = [Access::ReadWrite, Access::Read, Access::None]
            .map(|access| bench.resource(on(Location::HostNuma(0)).own_access(access)));
        let mut buffer = both.allocate(R).unwrap();
        for (granules, resource) in [(2, &reads), (18, &alone), (19, &both), (36, &both)] {
            buffer = buffer.grow_with(granules * R, &GrowOptions::new().chunk_of(resource)).unwrap();
        }
        assert_eq!(buffer.outcome() == Some(Outcome::Moved), hints != Hints::Granted);
        let pattern: Vec<u8> = (0..buffer.size()).map(|index| (index % 251) as u8).collect();
        buffer.copy_from_host(0, &pattern).unwrap();
        let mut seen = vec![0; pattern.len() - 3];
        buffer.copy_to_host(3, &mut seen).unwrap();
        assert!(seen == pattern[3..]);
        assert!(buffer.host_pointer().is_some());

        let stream = cuvmm_resource::StreamRef::create(&bench.device()).unwrap();
        let read = |offset: usize, bytes: usize| buffer.copy_to_host_on(&stream, offset, &mut vec![0; bytes]);
        let write = |offset: usize, bytes: usize| buffer.fill_on(&stream, offset, bytes, 1);
        let refused = |needed| Err(Error::NotAccessible { needed });
        bench.simulator.clear_calls();
        for (offset, bytes) in [(R - 1, 2), (R, R), (2 * R - 1, 1)] {
            assert_eq!(write(offset, bytes), refused(Access::ReadWrite), "{offset:#x}");
        }
        for (offset, bytes) in [(2 * R - 1, 2), (2 * R, 1), (18 * R - 1, 2), (0, 36 * R)] {
            assert_eq!(read(offset, bytes), refused(Access::Read), "{offset:#x}");
            assert_eq!(write(offset, bytes), refused(Access::ReadWrite), "{offset:#x}");
        }
        bench.assert_no_call();
        for (offset, bytes) in [(0, R), (18 * R, 18 * R), (36 * R - 1, 1)] {
            read(offset, bytes).unwrap();
            write(offset, bytes).unwrap();
        }
        read(0, 2 * R).unwrap();
        drop((buffer, stream, both, reads, alone));
        bench.assert_clean();
    }
}

#[test]
fn memory_of_another_location_can_not_be_added() {
    let bench = Bench::small();
    let (host, device) = (bench.resource(on(Location::Host)), bench.plain());
    let node = bench.resource(on(Location::HostNuma(0)));
    let buffer = host.allocate(G).unwrap();
    bench.simulator.clear_calls();
    for other in [&device, &node] {
        let error = buffer.grow_with(2 * G, &GrowOptions::new().chunk_of(other)).unwrap_err();
        assert_eq!(error, Error::ChunkMismatch { what: "location" });
    }
    bench.assert_no_call();
}

#[test]
fn ranges_beyond_the_buffer_are_never_touched() {
    let bench = Bench::small();
    let size = 2 * G;
    let buffer = bench.resource(host_alone()).allocate(size).unwrap();
    let shorter = buffer.truncate(G).unwrap();
    bench.simulator.clear_calls();
    for (offset, bytes) in [(0, size + 1), (size, 1), (size + 1, 0), (usize::MAX, 1), (usize::MAX, 0), (1, size)] {
        let refused = Err(Error::OutOfBounds { offset, bytes, size });
        let mut host = vec![0; bytes];
        assert_eq!(buffer.fill(offset, bytes, 1), refused);
        assert_eq!(buffer.copy_from_host(offset, &host), refused);
        assert_eq!(buffer.copy_to_host(offset, &mut host), refused);
    }
    assert_eq!(shorter.fill(G - 1, 2, 1), Err(Error::OutOfBounds { offset: G - 1, bytes: 2, size: G }));
    buffer.fill(size, 0, 1).unwrap();
    bench.assert_no_call();
    for (buffer, size) in [(&buffer, size), (&shorter, G)] {
        // SAFETY: nothing is written while the slice lives.
        assert_eq!(unsafe { buffer.as_slice() }.map(<[u8]>::len), Some(size));
    }
}

#[test]
fn only_memory_of_the_host_has_a_pointer() {
    let bench = Bench::small();
    let (host, device) = (bench.resource(host_alone()), bench.plain());
    let none = [
        device.allocate(G).unwrap(),
        host.allocate(0).unwrap(),
        host.allocate_with_capacity(0, G).unwrap(),
        host.allocate(G).unwrap().truncate(0).unwrap(),
    ];
    for mut buffer in none {
        assert_eq!(buffer.host_pointer(), None, "{buffer:?}");
        // SAFETY: there is nothing to have.
        assert_eq!(unsafe { buffer.as_slice() }, None);
        // SAFETY: as above.
        assert_eq!(unsafe { buffer.as_mut_slice() }, None);
    }
    bench.assert_clean();
}
