//! Older drivers, and such as deny what newer ones know: what can't be had is refused by type, and all else works.

use cuvmm_driver::sys::CUdevice_attribute;
use cuvmm_driver::{CUresult, Call};
use cuvmm_resource::{Error, HandleKind, Location, Options, Request, VirtualMemoryResource};
use cuvmm_sim::{Machine, When};

use crate::support::Bench;

/// The attributes that later drivers have: fabric handles, memory of the host's nodes, memory of the host.
const LATER: [CUdevice_attribute; 3] = [
    CUdevice_attribute::HANDLE_TYPE_FABRIC_SUPPORTED,
    CUdevice_attribute::HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    CUdevice_attribute::HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
];

fn made(bench: &Bench, options: Options) -> Result<VirtualMemoryResource, Error> {
    VirtualMemoryResource::new(&bench.device(), options)
}

/// What every driver with virtual memory management gives.
fn require_the_rest(bench: &Bench) {
    for options in [
        Options::new(),
        Options::new().handle_kind(HandleKind::PosixFd),
        Options::new().handle_kind_or(HandleKind::Fabric, HandleKind::PosixFd),
        Options::new().rdma(Request::Required),
        Options::new().compression(Request::Required),
    ] {
        let buffer = bench.resource(options).allocate(1).unwrap();
        buffer.fill(0, buffer.size(), 7).unwrap();
        assert!(bench.bytes_of(&buffer).iter().all(|byte| *byte == 7));
    }
    let denied = made(bench, Options::new().handle_kind(HandleKind::Fabric)).unwrap_err();
    assert_eq!(denied, Error::Unsupported { what: "memory exported as fabric handles", ordinal: 0 });
    let denied = made(bench, Options::new().location(Location::Host)).unwrap_err();
    assert_eq!(denied, Error::Unsupported { what: "virtual memory of the host", ordinal: 0 });
    bench.assert_clean();
}

#[test]
fn a_driver_that_knows_less_gives_what_it_has() {
    for version in [11040, 11080, 12010, 12020] {
        let bench = Bench::new(Machine::h200().driver_version(version));
        require_the_rest(&bench);
        // No attribute tells before 12.9: it is tried out.
        let node = made(&bench, Options::new().location(Location::HostNuma(0)));
        match node {
            Ok(resource) => {
                assert!(version >= 12020);
                drop(resource.allocate(1).unwrap());
            }
            Err(Error::NumaNodeRefused { node: 0, error }) => {
                assert!(version < 12020);
                assert_eq!(error.code(), Some(CUresult::INVALID_VALUE));
            }
            Err(error) => panic!("{version}: {error}"),
        }
        bench.assert_clean();
    }
}

#[test]
fn an_attribute_that_a_driver_does_not_know_is_no_failure() {
    let bench = Bench::new(Machine::h200().with_imex());
    let is_later = |arguments: &[u64]| LATER.iter().any(|attribute| u64::from(attribute.0) == arguments[1]);
    bench.faults.fail_when(Call::cuDeviceGetAttribute, is_later, CUresult::INVALID_VALUE, When::Before);
    require_the_rest(&bench);
    assert!(bench.faults.fired() > 0);
}

#[test]
fn a_driver_that_knows_later_attributes_and_denies_them_is_believed() {
    let mut machine = Machine::h200().with_imex();
    machine.devices[0].attributes.extend(LATER.map(|attribute| (attribute.0, 0)));
    let bench = Bench::new(machine);
    require_the_rest(&bench);
    let denied = made(&bench, Options::new().location(Location::HostNuma(0))).unwrap_err();
    assert_eq!(denied, Error::Unsupported { what: "virtual memory of the host's NUMA nodes", ordinal: 0 });
}

#[test]
fn a_driver_without_virtual_memory_management_is_told_at_once() {
    let mut machine = Machine::h200();
    machine.devices[0].attributes.insert(CUdevice_attribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED.0, 0);
    for (machine, what) in [(machine, "virtual memory management"), (Machine::h200().driver_version(10010), "")] {
        let bench = Bench::new(machine);
        for options in [Options::new(), Options::new().location(Location::Host), Options::new().rdma(Request::Required)]
        {
            let error = made(&bench, options).unwrap_err();
            assert!(matches!(error, Error::Unsupported { what: theirs, .. } if what.is_empty() || what == theirs));
        }
        assert_eq!(bench.count(Call::cuMemCreate), 0);
    }
}
