//! Allocations: one reference each, whatever it came from, and given back once.
//!
//! # Safety
//! What is retained is a mapping of the test's own.
#![allow(unsafe_code)]

mod support;

use std::os::fd::AsFd;
use std::sync::Arc;

use cuvmm_driver::Call;
use cuvmm_driver::sys::{
    CUdeviceptr, CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationPropFlags, CUmemLocation, CUresult,
};
use cuvmm_handles::{Allocation, Error, Granularity, Mapping, Origin};
use cuvmm_sim::When;
use support::{Bench, CODES, G};

const NONE: CUmemAllocationHandleType = CUmemAllocationHandleType::NONE;
const POSIX: CUmemAllocationHandleType = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;

#[test]
fn memory_says_what_it_is() {
    let bench = Bench::small();
    let memory = bench.memory_for(3, POSIX);
    assert_eq!((memory.size(), memory.origin()), (3 * G, Origin::Created(POSIX)));
    assert_eq!(memory.driver(), &bench.driver);
    assert_eq!(memory.properties().unwrap(), bench.properties(POSIX));
    assert_eq!(bench.simulator.physical_bytes(0), 3 * G);
}

#[test]
fn memory_made_here_keeps_the_flags_that_were_asked_for() {
    for bench in Bench::presets() {
        let size = Granularity::new(G).unwrap().exact(G).unwrap();
        let rdma = CUmemAllocationPropFlags { gpu_direct_rdma_capable: 1, ..Default::default() };
        let compressed = CUmemAllocationPropFlags { compression_type: 1, ..Default::default() };
        for flags in [CUmemAllocationPropFlags::default(), rdma, compressed] {
            let properties = CUmemAllocationProp { alloc_flags: flags, ..bench.properties(POSIX) };
            let memory = Allocation::create(&bench.driver, size, &properties).unwrap();
            assert_eq!(memory.flags(), Some(flags));
            let descriptor = memory.export_posix_fd().unwrap();
            let imported = Allocation::import_posix_fd(&bench.driver, descriptor.as_fd(), size).unwrap();
            assert_eq!(imported.flags(), None);
        }
        bench.assert_clean();
    }
}

#[test]
fn no_bytes_are_refused_before_any_call() {
    let bench = Bench::small();
    let none = Granularity::new(G).unwrap().exact(0).unwrap();
    let refused = Error::NotGranular { bytes: 0, granularity: G };
    let file = std::fs::File::open("/dev/null").unwrap();
    assert_eq!(Allocation::create(&bench.driver, none, &bench.properties(NONE)).unwrap_err(), refused);
    assert_eq!(Allocation::import_posix_fd(&bench.driver, file.as_fd(), none).unwrap_err(), refused);
    bench.assert_no_call();
}

#[test]
fn what_the_driver_refuses_leaves_nothing() {
    for bench in Bench::presets() {
        let granularity = Granularity::new(G).unwrap();
        let nowhere = CUmemAllocationProp::pinned(CUmemLocation::device(7), NONE);
        let size = granularity.exact(G).unwrap();
        let error = Allocation::create(&bench.driver, size, &nowhere).unwrap_err();
        assert_eq!((error.call(), error.code()), (Some(Call::cuMemCreate), Some(CUresult::INVALID_DEVICE)));

        let much = granularity.exact(2 << 30).unwrap();
        let error = Allocation::create(&bench.driver, much, &bench.properties(NONE)).unwrap_err();
        assert_eq!((error.call(), error.code()), (Some(Call::cuMemCreate), Some(CUresult::OUT_OF_MEMORY)));

        let file = std::fs::File::open("/dev/null").unwrap();
        let error = Allocation::import_posix_fd(&bench.driver, file.as_fd(), size).unwrap_err();
        assert_eq!(error.call(), Some(Call::cuMemImportFromShareableHandle));
        bench.assert_clean();
    }
}

#[test]
fn closing_and_dropping_give_the_reference_back_once() {
    for close in [true, false] {
        let bench = Bench::small();
        let memory = Arc::into_inner(bench.memory(1)).unwrap();
        if close {
            memory.close().unwrap();
        } else {
            drop(memory);
        }
        assert_eq!(bench.count(Call::cuMemRelease), 1);
        bench.assert_clean();
    }
}

#[test]
fn a_failed_release_is_told_once_counted_once_and_not_tried_again() {
    for code in CODES {
        for when in [When::Before, When::After] {
            let bench = Bench::small();
            let [closed, dropped] = [(); 2].map(|()| Arc::into_inner(bench.memory(1)).unwrap());
            bench.faults.fail(Call::cuMemRelease, 1, code, when);
            bench.faults.fail(Call::cuMemRelease, 2, code, when);
            let error = closed.close().unwrap_err();
            assert_eq!((error.call(), error.code()), (Some(Call::cuMemRelease), Some(code)));
            assert_eq!(bench.stranded(), [0, 1, 0, 0]);
            drop(dropped);
            assert_eq!(bench.stranded(), [0, 2, 0, 0]);
            assert_eq!(bench.faults.fired(), 2);
            assert_eq!(bench.count(Call::cuMemRelease), if when == When::After { 2 } else { 0 });
        }
    }
}

#[test]
fn memory_is_private_again_once_a_reference_to_it_was_given_back_and_not_where_that_failed() {
    let bench = Bench::small();
    let size = Granularity::new(G).unwrap().exact(G).unwrap();
    let memory = bench.memory(1);
    let mapping = Mapping::map(&bench.addresses(1), 0, memory.clone(), bench.access()).unwrap();
    // SAFETY: the mapping is this test's, and as long as its allocation.
    let retain = || unsafe { Allocation::retain(&bench.driver, mapping.address(), size) }.unwrap();
    assert!(memory.is_private());
    let [first, second] = [(); 2].map(|()| retain());
    assert!(!memory.is_private());
    first.close().unwrap();
    assert!(!memory.is_private(), "there is another");
    drop(second);
    assert!(memory.is_private());
    let [first, second] = [(); 2].map(|()| retain());
    bench.faults.fail(Call::cuMemRelease, 1, CUresult::UNKNOWN, When::Before);
    drop(first);
    second.close().unwrap();
    assert!(!memory.is_private(), "one reference is there still");
    assert_eq!(bench.stranded(), [0, 1, 0, 0]);
}

#[test]
fn after_the_driver_has_shut_down_letting_go_is_quiet() {
    let bench = Bench::small();
    let [closed, dropped] = [(); 2].map(|()| Arc::into_inner(bench.memory(1)).unwrap());
    bench.simulator.shut_down();
    assert_eq!(closed.close().unwrap_err().code(), Some(CUresult::DEINITIALIZED));
    drop(dropped);
    assert_eq!(bench.stranded(), [0; 4]);
}

#[test]
fn only_memory_made_here_for_it_is_exported() {
    let bench = Bench::small();
    let size = Granularity::new(G).unwrap().exact(G).unwrap();
    let plain = bench.memory(1);
    let shared = bench.memory_for(1, POSIX);
    let descriptor = shared.export_posix_fd().unwrap();
    let imported = Allocation::import_posix_fd(&bench.driver, descriptor.as_fd(), size).unwrap();
    let mapping = Mapping::map(&bench.addresses(1), 0, shared.clone(), bench.access()).unwrap();
    // SAFETY: the mapping is this test's, and as long as its allocation.
    let retained = unsafe { Allocation::retain(&bench.driver, mapping.address(), size) }.unwrap();
    assert_eq!((imported.origin(), retained.origin()), (Origin::Imported, Origin::Retained));

    bench.simulator.clear_calls();
    let lacks = |has| Err(Error::NotExportable { has, wanted: POSIX });
    assert_eq!(plain.export_posix_fd().map(drop), lacks(NONE));
    assert_eq!(imported.export_posix_fd().map(drop), Err(Error::Imported));
    assert_eq!(retained.export_posix_fd().map(drop), lacks(NONE));
    assert_eq!(shared.check_exportable(NONE), Err(Error::NotExportable { has: POSIX, wanted: NONE }));
    assert_eq!(shared.check_exportable(POSIX), Ok(()));
    bench.assert_no_call();
}

#[test]
fn an_exported_descriptor_pins_the_memory_and_no_import_needs_it_after() {
    for bench in Bench::presets() {
        let size = Granularity::new(G).unwrap().exact(2 * G).unwrap();
        let memory = bench.memory_for(2, POSIX);
        let descriptor = memory.export_posix_fd().unwrap();
        drop(memory);
        assert_eq!(bench.simulator.physical_bytes(0), 2 * G, "held by the descriptor alone");

        let imported = Allocation::import_posix_fd(&bench.driver, descriptor.as_fd(), size).unwrap();
        drop(descriptor);
        assert_eq!((bench.simulator.live().imported, bench.simulator.physical_bytes(0)), (1, 2 * G));
        let mapping = Mapping::map(&bench.addresses(1), 0, Arc::new(imported), bench.access()).unwrap();
        mapping.close().unwrap();
        bench.assert_clean();
    }
}

#[test]
fn an_import_of_another_size_than_it_says_is_found_out_by_the_map() {
    for bench in Bench::presets() {
        let memory = bench.memory_for(2, POSIX);
        let descriptor = memory.export_posix_fd().unwrap();
        for said in [1, 3] {
            let size = Granularity::new(G).unwrap().exact(said * G).unwrap();
            let imported = Arc::new(Allocation::import_posix_fd(&bench.driver, descriptor.as_fd(), size).unwrap());
            let range = bench.addresses(1);
            let error = Mapping::map(&range, 0, imported, bench.access()).unwrap_err();
            assert_eq!((error.call(), error.code()), (Some(Call::cuMemMap), Some(CUresult::NOT_SUPPORTED)));
            assert!(range.take(0, 2 << 20).is_ok(), "the room is free again");
        }
        drop((memory, descriptor));
        bench.assert_clean();
    }
}

#[test]
fn a_retained_reference_outlives_the_mapping_it_came_from() {
    for bench in Bench::presets() {
        let mapping = bench.mapping();
        let size = Granularity::new(G).unwrap().exact(G).unwrap();
        // SAFETY: the mapping is this test's, and as long as its allocation.
        let retained = unsafe { Allocation::retain(&bench.driver, mapping.address(), size) }.unwrap();
        assert_eq!(bench.simulator.live().allocations, 2);
        mapping.close().unwrap();
        assert_eq!(bench.simulator.physical_bytes(0), G);
        retained.close().unwrap();
        bench.assert_clean();

        let range = bench.addresses(1);
        for address in [range.address(), CUdeviceptr(0)] {
            // SAFETY: nothing is mapped there, so nothing is shared.
            let error = unsafe { Allocation::retain(&bench.driver, address, size) }.unwrap_err();
            assert_eq!(error.call(), Some(Call::cuMemRetainAllocationHandle));
        }
        drop(range);
        bench.assert_clean();
    }
}

#[test]
fn a_reference_that_a_failed_call_did_make_is_all_that_is_lost() {
    let size = Granularity::new(G).unwrap().exact(G).unwrap();
    for code in CODES {
        for when in [When::Before, When::After] {
            let bench = Bench::small();
            let lost = usize::from(when == When::After);
            bench.faults.fail(Call::cuMemCreate, 1, code, when);
            let error = Allocation::create(&bench.driver, size, &bench.properties(NONE)).unwrap_err();
            assert_eq!((error.call(), error.code()), (Some(Call::cuMemCreate), Some(code)));
            assert_eq!(bench.simulator.live().allocations, lost);

            let memory = bench.memory_for(1, POSIX);
            let descriptor = memory.export_posix_fd().unwrap();
            bench.faults.fail(Call::cuMemImportFromShareableHandle, 1, code, when);
            let error = Allocation::import_posix_fd(&bench.driver, descriptor.as_fd(), size).unwrap_err();
            assert_eq!((error.call(), error.code()), (Some(Call::cuMemImportFromShareableHandle), Some(code)));
            drop((memory, descriptor));
            assert_eq!(bench.simulator.live().allocations, 2 * lost);
            assert_eq!(bench.stranded(), [0; 4], "a failed making is no cleaning up");
        }
    }
}
