//! Fabric handles: bytes that name memory, and hold nothing.
#![allow(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod support;

use std::sync::Arc;

use cuvmm_driver::Call;
use cuvmm_driver::sys::{CUmemAllocationHandleType, CUmemFabricHandle, CUresult};
use cuvmm_handles::{Allocation, Error, GranularSize, Granularity, Mapping, Origin, Usage};
use cuvmm_sim::{Machine, Preset, When};
use support::{Bench, CODES, G};

const POSIX: CUmemAllocationHandleType = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
const FABRIC: CUmemAllocationHandleType = CUmemAllocationHandleType::FABRIC;
const BOTH: CUmemAllocationHandleType = CUmemAllocationHandleType(POSIX.0 | FABRIC.0);

/// One of each preset, with a channel.
fn presets() -> [Bench; 2] {
    [Preset::Strict, Preset::Measured].map(|preset| Bench::new(Machine::small().with_imex().preset(preset)))
}

fn size(units: usize) -> GranularSize {
    Granularity::new(G).unwrap().exact(units * G).unwrap()
}

#[test]
fn what_a_fabric_handle_named_when_it_was_imported_is_held_by_the_import() {
    for bench in presets() {
        for kinds in [FABRIC, BOTH] {
            let usage = Arc::<Usage>::default();
            let memory = Arc::into_inner(bench.memory_for(2, kinds)).unwrap().counted(&usage);
            let handle = memory.export_fabric().unwrap();
            assert_eq!(usage.exported(), 1);
            let imported = Allocation::import_fabric(&bench.driver, &handle, size(2)).unwrap();
            assert_eq!((imported.origin(), imported.size()), (Origin::Imported, 2 * G));
            memory.close().unwrap();
            assert_eq!((bench.simulator.live().imported, bench.simulator.physical_bytes(0)), (1, 2 * G));
            let mapping = Mapping::map(&bench.addresses(1), 0, Arc::new(imported), bench.access()).unwrap();
            mapping.close().unwrap();
            bench.assert_clean();
        }
    }
}

#[test]
fn a_fabric_handle_holds_nothing_by_itself() {
    for bench in presets() {
        let memory = bench.memory_for(1, FABRIC);
        let handle = memory.export_fabric().unwrap();
        drop(memory);
        assert_eq!(bench.simulator.physical_bytes(0), 0);
        let error = Allocation::import_fabric(&bench.driver, &handle, size(1)).unwrap_err();
        assert_eq!(error.call(), Some(Call::cuMemImportFromShareableHandle));
        bench.assert_clean();
    }
}

#[test]
fn only_memory_made_here_for_it_is_exported() {
    let [bench, _] = presets();
    let (file, fabric, both) = (bench.memory_for(1, POSIX), bench.memory_for(1, FABRIC), bench.memory_for(1, BOTH));
    let imported = Allocation::import_fabric(&bench.driver, &fabric.export_fabric().unwrap(), size(1)).unwrap();
    let exported = [both.export_fabric().map(drop), both.export_posix_fd().map(drop)];
    assert_eq!(exported, [Ok(()), Ok(())]);
    bench.simulator.clear_calls();
    assert_eq!(file.export_fabric().unwrap_err(), Error::NotExportable { has: POSIX, wanted: FABRIC });
    assert_eq!(fabric.export_posix_fd().unwrap_err(), Error::NotExportable { has: FABRIC, wanted: POSIX });
    assert_eq!(imported.export_fabric().unwrap_err(), Error::Imported);
    let none = Granularity::new(G).unwrap().exact(0).unwrap();
    let refused = Error::NotGranular { bytes: 0, granularity: G };
    assert_eq!(Allocation::import_fabric(&bench.driver, &CUmemFabricHandle::default(), none).unwrap_err(), refused);
    bench.assert_no_call();
}

#[test]
fn whatever_the_bytes_are_an_import_ends_in_an_error_or_in_memory() {
    for bench in presets() {
        let memory = bench.memory_for(1, FABRIC);
        let good = memory.export_fabric().unwrap();
        let import = |handle: &CUmemFabricHandle| Allocation::import_fabric(&bench.driver, handle, size(1));
        for at in 0..good.data.len() {
            for flip in [1, 0x80, 0xff] {
                let mut handle = good;
                handle.data[at] ^= flip;
                if let Err(error) = import(&handle) {
                    assert_eq!(error.call(), Some(Call::cuMemImportFromShareableHandle));
                }
            }
        }
        for byte in [0, 0xff] {
            assert!(import(&CUmemFabricHandle { data: [byte; 64] }).is_err());
        }
        assert!(import(&good).is_ok());
        drop(memory);
        bench.assert_clean();
    }
}

#[test]
fn without_a_channel_the_drivers_word_is_passed_on() {
    let [with, _] = presets();
    let memory = with.memory_for(1, FABRIC);
    let handle = memory.export_fabric().unwrap();
    for bench in Bench::presets() {
        let made = Allocation::create(&bench.driver, size(1), &bench.properties(FABRIC)).unwrap_err();
        assert_eq!((made.call(), made.code()), (Some(Call::cuMemCreate), Some(CUresult::NOT_PERMITTED)));
        let error = Allocation::import_fabric(&bench.driver, &handle, size(1)).unwrap_err();
        assert_eq!(error.code(), Some(CUresult::NOT_SUPPORTED));
        bench.assert_clean();
    }
}

#[test]
fn a_failed_export_or_import_counts_nothing() {
    for code in CODES {
        for bench in presets() {
            let usage = Arc::<Usage>::default();
            let memory = Arc::into_inner(bench.memory_for(1, FABRIC)).unwrap().counted(&usage);
            bench.faults.fail(Call::cuMemExportToShareableHandle, 1, code, When::Before);
            assert_eq!(memory.export_fabric().unwrap_err().code(), Some(code));
            assert_eq!(usage.exported(), 0);
            let handle = memory.export_fabric().unwrap();
            bench.faults.fail(Call::cuMemImportFromShareableHandle, 1, code, When::Before);
            let error = Allocation::import_fabric(&bench.driver, &handle, size(1)).unwrap_err();
            assert_eq!((error.call(), error.code()), (Some(Call::cuMemImportFromShareableHandle), Some(code)));
            drop(memory);
            bench.assert_clean();
        }
    }
}
