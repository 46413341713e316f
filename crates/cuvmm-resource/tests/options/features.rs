//! GPUDirect RDMA and compression: wanted, obtained, and told.

use cuvmm_driver::sys::CUdevice_attribute;
use cuvmm_driver::{CUresult, Call};
use cuvmm_resource::{Error, Location, Options, Outcome, Request, VirtualMemoryResource};
use cuvmm_sim::{Hints, Machine, When};

use crate::support::Bench;

const REQUESTS: [Request; 3] = [Request::Off, Request::IfSupported, Request::Required];
const COMPRESSION: &str = "compressible memory";
const RDMA: &str = "GPUDirect RDMA of virtual memory";

/// Whether each was obtained, of the resource and alike of every chunk of its buffers, added and moved ones too.
fn obtained(bench: &Bench, rdma: Request, compression: Request) -> Result<(bool, bool), Error> {
    let options = Options::new().rdma(rdma).compression(compression);
    let made = VirtualMemoryResource::new(&bench.device(), options);
    bench.assert_clean();
    let resource = made?;
    let has = (resource.has_rdma(), resource.has_compression());
    let buffer = resource.allocate(1)?;
    let grown = buffer.grow(40 << 20)?;
    let moved = buffer.grow(40 << 20)?;
    assert_eq!(moved.outcome(), Some(Outcome::Moved));
    for chunk in [&buffer, &grown, &moved].into_iter().flat_map(|buffer| buffer.chunks()) {
        assert_eq!((chunk.rdma, chunk.compression), has);
    }
    for mapping in [&buffer, &grown, &moved].into_iter().flat_map(|buffer| buffer.mappings()) {
        let flags = mapping.allocation().properties()?.alloc_flags;
        assert_eq!((flags.gpu_direct_rdma_capable != 0, flags.compression_type != 0), has, "what the driver says");
    }
    drop((buffer, grown, moved));
    bench.assert_clean();
    Ok(has)
}

fn lacks(what: &'static str) -> Error {
    Error::Unsupported { what, ordinal: 0 }
}

#[test]
fn each_can_be_had_alone_and_what_must_be_had_goes_first() {
    use Request::{IfSupported, Off, Required};
    for machine in [Machine::h200(), Machine::small()] {
        let bench = Bench::new(machine.hints(Hints::Refused(CUresult::INVALID_VALUE)));
        for (rdma, compression, expected) in [
            (Off, Off, Ok((false, false))),
            (IfSupported, Off, Ok((true, false))),
            (Required, Off, Ok((true, false))),
            (Off, IfSupported, Ok((false, true))),
            (Off, Required, Ok((false, true))),
            // Drivers drop compression from memory that RDMA reaches.
            (IfSupported, IfSupported, Ok((true, false))),
            (Required, IfSupported, Ok((true, false))),
            (IfSupported, Required, Ok((false, true))),
            (Required, Required, Err(lacks(COMPRESSION))),
        ] {
            assert_eq!(obtained(&bench, rdma, compression), expected, "{rdma:?} {compression:?}");
        }
    }
}

#[test]
fn what_is_not_wanted_is_not_tried_out() {
    let bench = Bench::small();
    bench.plain();
    assert_eq!(bench.count(Call::cuMemCreate), 0);
    assert_eq!(bench.count(Call::cuMemAddressReserve), 0);
}

#[test]
fn an_attribute_that_denies_it_spares_the_try() {
    for (attribute, what) in [
        (CUdevice_attribute::GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, RDMA),
        (CUdevice_attribute::GENERIC_COMPRESSION_SUPPORTED, COMPRESSION),
    ] {
        let mut machine = Machine::small().hints(Hints::Elsewhere);
        machine.devices[0].attributes.insert(attribute.0, 0);
        let bench = Bench::new(machine);
        let wanted = |request| if what == RDMA { (request, Request::Off) } else { (Request::Off, request) };
        let (rdma, compression) = wanted(Request::Required);
        assert_eq!(obtained(&bench, rdma, compression), Err(lacks(what)));
        assert_eq!(bench.count(Call::cuMemCreate), 0);
        let (rdma, compression) = wanted(Request::IfSupported);
        assert_eq!(obtained(&bench, rdma, compression), Ok((false, false)));
    }
    let bench = Bench::new(Machine::odd().hints(Hints::Elsewhere));
    assert_eq!(obtained(&bench, Request::IfSupported, Request::IfSupported), Ok((false, false)));
}

#[test]
fn access_that_is_then_refused_counts_as_not_supported() {
    let mut machine = Machine::small().hints(Hints::Elsewhere);
    machine.rdma_grants = Some(CUresult::INVALID_VALUE);
    let bench = Bench::new(machine);
    assert_eq!(obtained(&bench, Request::IfSupported, Request::Off), Ok((false, false)));
    // It is no reason to go without the other.
    assert_eq!(obtained(&bench, Request::IfSupported, Request::IfSupported), Ok((false, true)));
    let refused = obtained(&bench, Request::Required, Request::Off).unwrap_err();
    assert_eq!((refused.call(), refused.code()), (Some(Call::cuMemSetAccess), Some(CUresult::INVALID_VALUE)));
    let location = Some(bench.device().location());
    assert!(matches!(refused, Error::AccessRefused { location: theirs, .. } if theirs == location), "{refused}");
}

#[test]
fn what_a_driver_drops_without_a_word_was_not_obtained() {
    let mut machine = Machine::small().hints(Hints::Elsewhere);
    machine.compresses = false;
    let bench = Bench::new(machine);
    assert_eq!(obtained(&bench, Request::Off, Request::IfSupported), Ok((false, false)));
    assert_eq!(obtained(&bench, Request::Off, Request::Required), Err(lacks(COMPRESSION)));
}

#[test]
fn memory_of_the_host_has_neither() {
    let bench = Bench::small();
    for location in [Location::Host, Location::HostNuma(0), Location::HostNumaCurrent] {
        for (rdma, compression) in REQUESTS.into_iter().flat_map(|rdma| REQUESTS.map(|other| (rdma, other))) {
            let options = Options::new().location(location).rdma(rdma).compression(compression);
            match VirtualMemoryResource::new(&bench.device(), options) {
                Ok(resource) => {
                    assert!(rdma != Request::Required && compression != Request::Required);
                    assert!(!resource.has_rdma() && !resource.has_compression());
                    drop(resource.allocate(1).unwrap());
                }
                Err(error) => {
                    // It is not the device that lacks them.
                    let what = if rdma == Request::Required {
                        "GPUDirect RDMA of the host's memory"
                    } else {
                        "compressible memory of the host"
                    };
                    assert!(rdma == Request::Required || compression == Request::Required);
                    assert_eq!(error, lacks(what));
                }
            }
        }
    }
    bench.assert_clean();
}

#[test]
fn whatever_call_of_the_try_fails_leaves_nothing_behind() {
    let calls = [
        Call::cuMemCreate,
        Call::cuMemGetAllocationPropertiesFromHandle,
        Call::cuMemAddressReserve,
        Call::cuMemMap,
        Call::cuMemSetAccess,
    ];
    for call in calls {
        for request in [Request::IfSupported, Request::Required] {
            let bench = Bench::new(Machine::small().hints(Hints::Elsewhere));
            bench.faults.fail(call, 1, CUresult::UNKNOWN, When::Before);
            match obtained(&bench, request, Request::Off) {
                Ok(has) => assert_eq!((request, has), (Request::IfSupported, (false, false))),
                Err(error) => {
                    assert_eq!((request, error.call()), (Request::Required, Some(call)));
                    assert_eq!(error.code(), Some(CUresult::UNKNOWN));
                }
            }
            assert_eq!(bench.faults.fired(), 1);
        }
    }
}

#[test]
fn memory_that_is_short_is_no_reason_to_go_without() {
    for request in [Request::IfSupported, Request::Required] {
        let bench = Bench::new(Machine::small().hints(Hints::Elsewhere));
        bench.faults.fail(Call::cuMemCreate, 1, CUresult::OUT_OF_MEMORY, When::Before);
        let error = obtained(&bench, request, Request::Off).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory(_)), "{error}");
        assert_eq!(obtained(&bench, request, Request::Off), Ok((true, false)));

        // The hook is asked here, too.
        bench.faults.fail(Call::cuMemCreate, 1, CUresult::OUT_OF_MEMORY, When::Before);
        let resource = bench.resource(Options::new().rdma(request).on_out_of_memory(|_| true));
        assert!(resource.has_rdma());
    }
}
