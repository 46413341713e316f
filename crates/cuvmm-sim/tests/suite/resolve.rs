//! Resolving entry points by name: question Q28, and which signature a version stands for.

use std::ffi::{CStr, c_void};
use std::sync::LazyLock;

use cuvmm_driver::sys::{CUdriverProcAddressQueryResult, CudaVersion};
use cuvmm_driver::{Call, Driver, RawDriver, Served, Symbol, Table, entry_point};
use cuvmm_sim::{Machine, Simulator};

/// A driver of CUDA 13.0 that is served to C.
struct Current;

impl Served for Current {
    fn served() -> &'static dyn RawDriver {
        current()
    }
}

fn current() -> &'static Simulator {
    static DRIVER: LazyLock<Simulator> = LazyLock::new(|| served::<Current>(13000));
    &DRIVER
}

fn served<D: Served>(version: i32) -> Simulator {
    let simulator = Simulator::new(Machine::h200().driver_version(version));
    simulator.serve::<D>();
    simulator
}

/// What no call writes.
const UNTOUCHED: usize = 0xDEAD;

/// The code, what is in the pointer's place, and the status, which was none before.
fn ask(driver: &dyn RawDriver, name: &CStr, version: i32, flags: u64) -> (u32, usize, u32) {
    let mut found: *mut c_void = std::ptr::without_provenance_mut(UNTOUCHED);
    let mut status = CUdriverProcAddressQueryResult(99);
    // SAFETY: the name is a C string, and the outputs are locals.
    let code = unsafe { driver.cuGetProcAddress(name.as_ptr(), &raw mut found, version, flags, &raw mut status) };
    (code.0, found.addr(), status.0)
}

#[test]
fn each_call_is_found_by_its_name_and_version() {
    for &call in Call::ALL {
        let Symbol { name, version, core, .. } = call.symbol();
        if core || current().provides(call) {
            let here = entry_point::<Current>(call).addr();
            assert_eq!(ask(current(), name, version.0, 0), (0, here, 0), "{call}");
            assert_eq!(ask(current(), name, version.0, 1), (0, here, 0), "{call}");
        }
    }
}

#[test]
fn a_name_that_is_newer_than_the_version_asked_for_is_told_from_one_that_is_none() {
    let newer = [(c"cuMemMap", 10010), (c"cuMemRetainAllocationHandle", 10020), (c"cuStreamGetDevice", 12070)];
    for (name, version) in newer {
        assert_eq!(ask(current(), name, version, 0), (0, 0, 2), "{name:?}");
    }
    for name in [c"cuNone", c"cumemmap", c"CuMemMap", c"cuMemAlloc_v2", c"cuMemcpy_ptds", c""] {
        assert_eq!(ask(current(), name, 13000, 0), (0, 0, 1), "{name:?}");
    }
}

#[test]
fn a_version_above_the_drivers_is_refused_and_nothing_is_written() {
    assert_eq!(ask(current(), c"cuMemMap", 13010, 0), (1, UNTOUCHED, 99));
    assert_eq!(ask(current(), c"cuNone", 13010, 0), (1, UNTOUCHED, 99));
    assert_eq!(ask(current(), c"cuMemMap", 10020, 3), (1, UNTOUCHED, 99), "unknown flags");
}

#[test]
fn only_the_status_may_be_left_out() {
    let (name, mut found, null) = (c"cuMemMap".as_ptr(), std::ptr::null_mut(), std::ptr::null_mut::<c_void>());
    let driver = current();
    // SAFETY: the name is a C string, and the outputs are locals or null.
    let codes = unsafe {
        [
            driver.cuGetProcAddress(std::ptr::null(), &raw mut found, 13000, 0, null.cast()),
            driver.cuGetProcAddress(name, null.cast(), 13000, 0, null.cast()),
            driver.cuGetProcAddress(name, &raw mut found, 13000, 0, null.cast()),
        ]
    };
    assert_eq!(codes.map(|code| code.0), [1, 1, 0]);
    assert_eq!(found.addr(), entry_point::<Current>(Call::cuMemMap).addr());
}

#[test]
fn a_signature_that_is_not_the_lists_is_not_given_out() {
    let other = [
        (c"cuGetProcAddress", 11030),
        (c"cuCtxGetDevice", 13000),
        (c"cuCtxSynchronize", 13000),
        (c"cuStreamGetCtx", 12050),
        (c"cuStreamGetCaptureInfo", 10010),
        (c"cuStreamGetCaptureInfo", 12030),
        (c"cuStreamBeginCapture", 10000),
        (c"cuDeviceGetUuid", 9020),
        (c"cuStreamDestroy", 2000),
        (c"cuMemAlloc", 2000),
        (c"cuMemsetD8", 3010),
    ];
    for (name, version) in other {
        assert_eq!(ask(current(), name, version, 0), (0, 0, 1), "{name:?} of {version}");
    }
    let same = [(c"cuCtxSynchronize", 12090), (c"cuStreamGetCaptureInfo", 12020), (c"cuMemAlloc", 13000)];
    for (name, version) in same {
        assert_eq!(ask(current(), name, version, 0).2, 0, "{name:?} of {version}");
    }
    let later = served::<Current>(13010);
    assert_eq!(ask(&later, c"cuLaunchHostFunc", 13010, 0), (0, 0, 1));
    assert_eq!(ask(&later, c"cuLaunchHostFunc", 13000, 0).2, 0);
}

#[test]
fn per_thread_forms_are_not_given_out_where_there_are_any() {
    assert_eq!(ask(current(), c"cuMemcpy", 7000, 2), (0, 0, 1));
    assert_eq!(ask(current(), c"cuStreamSynchronize", 7000, 2), (0, 0, 1));
    assert_eq!(ask(current(), c"cuMemMap", 10020, 2).2, 0);
}

#[test]
fn an_older_driver_hides_later_names() {
    let older = served::<Current>(12020);
    assert_eq!(ask(&older, c"cuStreamGetDevice", 12020, 0), (0, 0, 2));
    assert_eq!(ask(&older, c"cuStreamGetDevice", 12080, 0), (1, UNTOUCHED, 99));
    let oldest = served::<Current>(11080);
    assert!(!oldest.provides(Call::cuGetProcAddress), "of CUDA 12.0");
    assert_eq!(ask(&oldest, c"cuMemMap", 10020, 0), (801, UNTOUCHED, 99));
    assert!(oldest.resolve(c"cuMemMap", CudaVersion(10020), 0).is_ok_and(|(found, _)| !found.is_null()));
}

#[test]
fn a_driver_that_nothing_serves_to_c_lacks_the_call() {
    let simulator = Simulator::new(Machine::h200());
    assert!(!simulator.provides(Call::cuGetProcAddress));
    assert_eq!(ask(&simulator, c"cuMemMap", 10020, 0), (801, UNTOUCHED, 99));
}

#[test]
fn a_table_filled_by_name_drives_the_simulator() {
    let driver = current();
    let mut source = |symbol: &Symbol| match driver.resolve(symbol.name, symbol.version, 0) {
        Ok((found, _)) => found,
        Err(_) => std::ptr::null(),
    };
    // SAFETY: the addresses are those of entry points that have their symbols' signatures and are never unloaded.
    let table = unsafe { Table::from_source(&mut source) }.unwrap();
    let driver = Driver::new(table).unwrap();
    assert_eq!(driver.device_count(), 1);
    assert!(driver.mem_address_reserve(2 << 20, 0, Default::default()).is_ok());
}
