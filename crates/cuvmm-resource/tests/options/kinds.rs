//! Handle kinds and granularities: had, refused, made do without, and found out once.

use cuvmm_driver::sys::{CUdevice_attribute, CUmemAllocationGranularity_flags, CUmemAllocationHandleType};
use cuvmm_driver::{CUresult, Call};
use cuvmm_handles::Allocation;
use cuvmm_resource::{Error, GranularityKind, HandleKind, Location, Options, Outcome, VirtualMemoryResource};
use cuvmm_sim::{Machine, When};

use crate::support::Bench;

const MIB: usize = 1 << 20;
const KINDS: [HandleKind; 4] =
    [HandleKind::None, HandleKind::PosixFd, HandleKind::Fabric, HandleKind::PosixFdAndFabric];
/// The steps of a probe that can be refused.
const STEPS: [Call; 3] = [Call::cuMemCreate, Call::cuMemExportToShareableHandle, Call::cuMemImportFromShareableHandle];

fn made(bench: &Bench, options: Options) -> Result<VirtualMemoryResource, Error> {
    VirtualMemoryResource::new(&bench.device(), options)
}

#[test]
fn each_kind_is_had_where_the_machine_has_it_and_added_chunks_have_it_too() {
    for (machine, sizes) in [
        (Machine::odd(), [1, 2, 32, 32]),
        (Machine::h200().with_imex(), [2; 4]),
        (Machine::small().with_imex(), [0; 4]),
    ] {
        let bench = Bench::new(machine);
        for (kind, size) in KINDS.into_iter().zip(sizes) {
            let resource = bench.resource(Options::new().handle_kind(kind));
            assert_eq!((resource.handle_kind(), resource.handle_refused()), (kind, None));
            assert_eq!(resource.is_ipc_enabled(), kind != HandleKind::None);
            let buffer = resource.allocate(1).unwrap();
            let grown = buffer.grow(100 * MIB).unwrap();
            assert!(grown.chunks().len() > 1);
            assert!(grown.chunks().iter().all(|chunk| chunk.handle_kinds == kind.as_driver()), "{kind:?}");
            let empty = resource.allocate(0).unwrap();
            assert!(
                [&buffer, &grown, &empty].iter().all(|buffer| buffer.export_kinds() == kind.as_driver()),
                "{kind:?}"
            );
            let size = if size == 0 { 64 << 10 } else { size * MIB };
            assert_eq!((resource.granularity().bytes(), buffer.size()), (size, size), "{kind:?}");
        }
        bench.assert_clean();
    }
}

#[test]
fn what_is_not_permitted_is_refused_and_nothing_else_taken_unasked() {
    let bench = Bench::new(Machine::h200());
    for kind in [HandleKind::Fabric, HandleKind::PosixFdAndFabric] {
        let refused = made(&bench, Options::new().handle_kind(kind)).unwrap_err();
        assert!(matches!(refused, Error::HandleKindRefused { kind: theirs, .. } if theirs == kind), "{refused}");
        assert_eq!((refused.call(), refused.code()), (Some(Call::cuMemCreate), Some(CUresult::NOT_PERMITTED)));
        assert!(refused.to_string().ends_with(", as without an IMEX channel"), "{refused}");
        // A second call replaces what was there to fall back on.
        let options = Options::new().handle_kind_or(kind, HandleKind::PosixFd).handle_kind(kind);
        assert_eq!(made(&bench, options).unwrap_err(), refused);

        for fallback in [HandleKind::PosixFd, HandleKind::None] {
            let resource = bench.resource(Options::new().handle_kind_or(kind, fallback));
            assert_eq!((resource.handle_kind(), resource.handle_refused()), (fallback, Some(&refused)));
            assert_eq!(resource.is_ipc_enabled(), fallback != HandleKind::None);
            assert_eq!(resource.options().handle_kind, kind, "what was asked for");
            let buffer = resource.allocate(1).unwrap();
            assert_eq!(buffer.chunks()[0].handle_kinds, fallback.as_driver());
        }
        let none_either = Options::new().handle_kind_or(kind, HandleKind::Fabric);
        let refused = made(&bench, none_either).unwrap_err();
        assert!(matches!(refused, Error::HandleKindRefused { kind: HandleKind::Fabric, .. }), "{refused}");
    }
    bench.assert_clean();
}

#[test]
fn an_attribute_that_denies_a_kind_spares_the_try() {
    let mut machine = Machine::h200().with_imex();
    machine.devices[0].attributes.insert(CUdevice_attribute::HANDLE_TYPE_FABRIC_SUPPORTED.0, 0);
    let bench = Bench::new(machine);
    let lacks = Error::Unsupported { what: "memory exported as fabric handles", ordinal: 0 };
    assert_eq!(made(&bench, Options::new().handle_kind(HandleKind::Fabric)).unwrap_err(), lacks);
    let resource = bench.resource(Options::new().handle_kind_or(HandleKind::Fabric, HandleKind::None));
    assert_eq!((resource.handle_kind(), resource.handle_refused()), (HandleKind::None, Some(&lacks)));
    assert_eq!(bench.count(Call::cuMemCreate), 0);
    drop(resource.allocate(1).unwrap());
    bench.assert_clean();
}

#[test]
fn a_kind_is_tried_out_once_however_many_resources_ask_for_it_and_not_where_none_does() {
    let bench = Bench::new(Machine::h200());
    for _ in 0..100 {
        bench.plain();
    }
    assert_eq!(bench.count(Call::cuMemCreate), 0);
    for _ in 0..100 {
        let resource = bench.resource(Options::new().handle_kind_or(HandleKind::Fabric, HandleKind::PosixFd));
        assert_eq!(resource.handle_kind(), HandleKind::PosixFd);
    }
    assert_eq!(bench.count(Call::cuMemCreate), 2, "one for each kind");
    drop(bench.resource(Options::new().handle_kind(HandleKind::PosixFd)).allocate(1).unwrap());
    assert_eq!(bench.count(Call::cuMemCreate), 3);
    bench.assert_clean();
}

#[test]
fn whatever_the_try_fails_with_is_no_and_is_told() {
    let codes = [800, 801, 1, 101, 802, 46, 999].map(CUresult);
    for kind in [HandleKind::PosixFd, HandleKind::Fabric, HandleKind::PosixFdAndFabric] {
        for (step, code) in STEPS.into_iter().flat_map(|step| codes.map(|code| (step, code))) {
            let bench = Bench::new(Machine::small().with_imex());
            bench.faults.fail(step, 1, code, When::Before);
            let refused = made(&bench, Options::new().handle_kind(kind)).unwrap_err();
            assert!(matches!(refused, Error::HandleKindRefused { kind: theirs, .. } if theirs == kind), "{refused}");
            assert_eq!((refused.call(), refused.code()), (Some(step), Some(code)));
            bench.assert_clean();

            bench.simulator.clear_calls();
            let resource = bench.resource(Options::new().handle_kind_or(kind, HandleKind::None));
            assert_eq!(resource.handle_refused(), Some(&refused), "found out once");
            assert_eq!(bench.count(Call::cuMemCreate), 0);
            drop(resource.allocate(1).unwrap());
            bench.assert_clean();
        }
    }
}

#[test]
fn what_is_short_when_a_kind_is_tried_out_says_nothing_of_it() {
    for code in [CUresult::OUT_OF_MEMORY, CUresult::OPERATING_SYSTEM] {
        for step in STEPS {
            let bench = Bench::new(Machine::small().with_imex());
            bench.faults.fail(step, 1, code, When::Before);
            let options = Options::new().handle_kind_or(HandleKind::Fabric, HandleKind::None);
            let resource = bench.resource(options);
            assert_eq!((resource.handle_kind(), resource.handle_refused()), (HandleKind::Fabric, None));
            drop(resource.allocate(1).unwrap());
            bench.assert_clean();
        }
    }
    // What could not be found out then shows when memory is made.
    let bench = Bench::new(Machine::small());
    bench.faults.fail(Call::cuMemCreate, 1, CUresult::OUT_OF_MEMORY, When::Before);
    let resource = bench.resource(Options::new().handle_kind(HandleKind::Fabric));
    let refused = resource.allocate(1).unwrap_err();
    assert!(matches!(refused, Error::HandleKindRefused { kind: HandleKind::Fabric, .. }), "{refused}");
    bench.assert_clean();
}

#[test]
fn a_kind_is_made_do_without_only_where_it_can_not_be_had() {
    let bench = Bench::new(Machine::small());
    let is_fabric = |arguments: &[u64]| arguments[1] == u64::from(CUdevice_attribute::HANDLE_TYPE_FABRIC_SUPPORTED.0);
    bench.faults.fail_when(Call::cuDeviceGetAttribute, is_fabric, CUresult::UNKNOWN, When::Before);
    let options = Options::new().handle_kind_or(HandleKind::Fabric, HandleKind::None);
    let error = made(&bench, options).unwrap_err();
    assert_eq!((error.call(), error.code()), (Some(Call::cuDeviceGetAttribute), Some(CUresult::UNKNOWN)));
    assert_eq!(bench.count(Call::cuMemCreate), 0);
}

#[test]
fn refusals_of_memory_without_a_kind_are_not_the_kinds() {
    let bench = Bench::small();
    for kind in [HandleKind::None, HandleKind::PosixFd] {
        let resource = bench.resource(Options::new().handle_kind(kind));
        bench.faults.fail(Call::cuMemCreate, 1, CUresult::NOT_PERMITTED, When::Before);
        let error = resource.allocate(1).unwrap_err();
        assert!(matches!(error, Error::Handles(cuvmm_handles::Error::Create { .. })), "{error}");
        assert_eq!(error.code(), Some(CUresult::NOT_PERMITTED));
    }
    bench.assert_clean();
}

#[test]
fn kinds_that_can_not_be_reach_no_driver() {
    let bench = Bench::new(Machine::odd());
    for kind in &KINDS[1..] {
        for options in [
            Options::new().location(Location::Host).handle_kind(*kind),
            Options::new().handle_kind_or(*kind, HandleKind::None).location(Location::Host),
            Options::new().handle_kind_or(HandleKind::None, *kind).location(Location::Host),
        ] {
            assert_eq!(made(&bench, options).unwrap_err(), Error::HandleKindOfHost { kind: *kind });
        }
    }
    bench.assert_no_call();
    for kind in KINDS {
        assert_eq!(HandleKind::try_from(kind.as_driver()), Ok(kind));
    }
    for kinds in [2, 3, 4, 0x10, u32::MAX].map(CUmemAllocationHandleType) {
        assert_eq!(HandleKind::try_from(kinds), Err(Error::UnknownHandleKind { kinds }));
    }
}

/// A machine whose recommended granularity is not its least.
fn two_granularities() -> Bench {
    Bench::new(Machine::h200().granularity(|_, option| {
        if option == CUmemAllocationGranularity_flags::RECOMMENDED { 64 * MIB } else { 2 * MIB }
    }))
}

#[test]
fn the_granularity_is_the_one_that_is_asked_for() {
    let bench = two_granularities();
    for (kind, unit) in [(GranularityKind::Minimum, 2 * MIB), (GranularityKind::Recommended, 64 * MIB)] {
        let resource = bench.resource(Options::new().granularity(kind));
        let buffer = resource.allocate(1).unwrap();
        assert_eq!((resource.granularity().bytes(), buffer.size()), (unit, unit));
        assert_eq!(resource.minimum_granularity().bytes(), 2 * MIB);
        let grown = buffer.grow(unit + 1).unwrap();
        assert_eq!(grown.size(), 2 * unit);
        assert!(grown.chunks().iter().all(|chunk| chunk.address.0 % unit as u64 == 0));
        drop((buffer, grown));
    }
    bench.assert_clean();
}

#[test]
fn what_comes_from_elsewhere_is_measured_by_the_minimum_granularity() {
    let bench = two_granularities();
    let resource = bench.resource(Options::new().granularity(GranularityKind::Recommended));
    let plain = bench.plain();
    let theirs = plain.allocate(5 * MIB).unwrap();
    assert_eq!(theirs.size(), 6 * MIB);
    let make = |_, size| -> Result<Allocation, Error> {
        let properties =
            cuvmm_driver::sys::CUmemAllocationProp::pinned(bench.device().location(), CUmemAllocationHandleType::NONE);
        Ok(Allocation::create(&bench.driver, size, &properties)?)
    };
    let buffer = resource.map_chunks(&[6 * MIB], 5 * MIB, make).unwrap();
    assert_eq!((buffer.size(), buffer.capacity(), buffer.chunks()[0].size), (5 * MIB, 6 * MIB, 6 * MIB));
    let not_granular = cuvmm_handles::Error::NotGranular { bytes: 6 * MIB + 1, granularity: 2 * MIB };
    let refused = resource.map_chunks(&[6 * MIB + 1], 5 * MIB, make).unwrap_err();
    assert_eq!(refused, Error::Handles(not_granular));
    // What is there is shown, and chunks of the resource's own begin at multiples of its granularity.
    bench.simulator.clear_calls();
    let all = buffer.grow(6 * MIB).unwrap();
    assert_eq!((all.size(), all.outcome()), (6 * MIB, Some(Outcome::Covered)));
    let not_granular = cuvmm_handles::Error::NotGranular { bytes: 6 * MIB, granularity: 64 * MIB };
    assert_eq!(buffer.grow(7 * MIB).map(drop), Err(Error::Handles(not_granular)));
    bench.assert_no_call();
    drop((buffer, all, theirs));
    bench.assert_clean();
}
