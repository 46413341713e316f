//! What the library exports and what cuGetProcAddress finds: by name, version and flag.
//!
//! # Safety
//! Symbols are called in the signature of the name and version that they were asked for.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};

use cuvmm_driver::sys::*;
use cuvmm_driver::{Call, CudaVersion, Driver, Symbol, Table};
use libloading::os::unix::Library;

use crate::round_trip::{self, UNIT, map, pattern, read};
use crate::stand_in;

type Resolve = unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64, *mut u32) -> CUresult;
type ResolveOlder = unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64) -> CUresult;

/// What cuGetProcAddress writes to where nothing is to be written.
const UNTOUCHED: usize = 0x77;

fn export(library: &Library, name: &CStr) -> *const c_void {
    // SAFETY: the value is taken as an address.
    let symbol = unsafe { library.get::<*const c_void>(name.to_bytes_with_nul()) };
    symbol.map_or(std::ptr::null(), |symbol| symbol.as_raw_ptr().cast_const())
}

/// cuGetProcAddress_v2's code, pointer and status.
fn resolve(name: &CStr, version: i32, flags: u64) -> (u32, usize, u32) {
    // SAFETY: the library exports the name in this signature.
    let resolve: Resolve = unsafe { std::mem::transmute(export(&stand_in::open(), c"cuGetProcAddress_v2")) };
    let mut address = std::ptr::without_provenance_mut(UNTOUCHED);
    let mut status = UNTOUCHED as u32;
    // SAFETY: the name ends in NUL, and both outputs are locals.
    let code = unsafe { resolve(name.as_ptr(), &raw mut address, version, flags, &raw mut status) };
    (code.0, address.addr(), status)
}

/// What a call beyond the list answers.
fn answer(address: usize) -> u32 {
    assert!(address != 0 && address != UNTOUCHED);
    // SAFETY: the function looks at no argument.
    let call: extern "C" fn() -> u32 = unsafe { std::mem::transmute(address) };
    call()
}

/// A driver from symbols found one by one.
fn driver_from(mut source: impl FnMut(&Symbol) -> *const c_void) -> Driver {
    // SAFETY: the library exports functions of the symbols' signatures, and is never unloaded.
    Driver::new(unsafe { Table::from_source(&mut source) }.unwrap()).unwrap()
}

#[test]
fn a_driver_is_found_by_exported_names() {
    let library = stand_in::open();
    let driver = driver_from(|symbol| export(&library, symbol.export));
    assert_eq!(driver.device(0).unwrap().name().unwrap(), "Simulated H200");
    for &call in Call::ALL {
        assert!(driver.raw().provides(call), "{call}");
    }
}

#[test]
fn a_driver_is_found_by_the_older_resolver() {
    // SAFETY: the library exports the name in this signature.
    let resolve: ResolveOlder = unsafe { std::mem::transmute(export(&stand_in::open(), c"cuGetProcAddress")) };
    let driver = driver_from(|symbol| {
        let mut address = std::ptr::null_mut();
        // SAFETY: the name ends in NUL, and the output is a local.
        let code = unsafe { resolve(symbol.name.as_ptr(), &raw mut address, symbol.version.0, 0) };
        if code.is_success() { address } else { std::ptr::null() }
    });
    assert_eq!(driver.version(), CudaVersion(13000));
}

#[test]
fn both_resolvers_are_found_by_their_versions() {
    let library = stand_in::open();
    let exported = |name| export(&library, name).addr();
    assert_eq!(resolve(c"cuGetProcAddress", 12000, 0), (0, exported(c"cuGetProcAddress_v2"), 0));
    assert_eq!(resolve(c"cuGetProcAddress", 11030, 0), (0, exported(c"cuGetProcAddress"), 0));
    assert_eq!(resolve(c"cuGetProcAddress", 11020, 0), (0, 0, 2));
}

#[test]
fn what_is_not_found_says_why() {
    assert_eq!(resolve(c"cuMemMap", 10000, 0), (0, 0, 2), "newer than the version");
    assert_eq!(resolve(c"cuNoSuchCall", 13000, 0), (0, 0, 1), "no driver has it");
    assert_eq!(resolve(c"cumemmap", 13000, 0), (0, 0, 1), "another case");
    assert_eq!(resolve(c"cuMemAlloc_v2", 13000, 0), (0, 0, 1), "an exported name");
    assert_eq!(resolve(c"cuMemMap", 13010, 0), (1, UNTOUCHED, UNTOUCHED as u32), "above the driver's version");
}

#[test]
fn the_drivers_names_beyond_the_list_are_not_supported() {
    for name in [c"cuMemAllocAsync", c"cuGraphAddNode", c"cuMulticastCreate", c"cuModuleLoadDataEx"] {
        let (code, address, status) = resolve(name, 13000, 0);
        assert_eq!((code, status), (0, 0), "{name:?}");
        assert_eq!(answer(address), 801, "{name:?}");
    }
    let exported = export(&stand_in::open(), c"cuMemAllocAsync");
    assert_eq!(answer(exported.addr()), 801);
}

/// A name asked for at a version at which it has another signature is not called in the list's.
#[test]
fn another_signature_is_not_supported() {
    for (name, version) in [(c"cuStreamGetCaptureInfo", 12030), (c"cuCtxSynchronize", 13000), (c"cuMemAlloc", 2000)] {
        assert_eq!(answer(resolve(name, version, 0).1), 801, "{name:?}");
    }
}

/// What the runtime library asks for besides is not there, so that it says that there is no driver for it.
#[test]
fn there_is_no_export_table() {
    assert!(export(&stand_in::open(), c"cuGetExportTable").is_null());
    assert_eq!(resolve(c"cuGetExportTable", 13000, 0), (0, 0, 1));
}

#[test]
fn per_thread_forms_are_those_that_are_exported() {
    let library = stand_in::open();
    let check = |name: &CStr, exported: &CStr| {
        let (code, address, status) = resolve(name, 12000, 2);
        assert_eq!((code, address, status), (0, export(&library, exported).addr(), 0), "{name:?}");
    };
    check(c"cuMemcpyHtoDAsync", c"cuMemcpyHtoDAsync_v2_ptsz");
    check(c"cuMemcpy", c"cuMemcpy_ptds");
    check(c"cuStreamBeginCapture", c"cuStreamBeginCapture_v2_ptsz");
    for without in [c"cuMemMap", c"cuStreamDestroy", c"cuEventQuery"] {
        assert_eq!(resolve(without, 12000, 2), resolve(without, 12000, 0), "{without:?}");
    }
}

#[test]
fn no_call_lacks_its_per_thread_form() {
    let beyond = resolve(c"cuMemAllocAsync", 13000, 2).1;
    let missing = Call::ALL.iter().filter(|call| {
        let symbol = call.symbol();
        let find = |flags| resolve(symbol.name, symbol.version.0, flags).1;
        find(0) != beyond && find(2) == beyond
    });
    assert_eq!(missing.collect::<Vec<_>>(), [&Call::cuGetProcAddress; 0]);
}

/// In a process of its own: what other tests copy by the legacy default stream meanwhile would end the capture.
#[test]
fn per_thread_forms_take_the_threads_own_stream() {
    stand_in::alone("symbols::per_thread_forms_take_the_threads_own_stream", &[], capture_and_copy_on_the_own_stream);
}

/// The null stream of a per-thread form can be captured, as the legacy default stream cannot.
fn capture_and_copy_on_the_own_stream() {
    type CopyOnStream = unsafe extern "C" fn(CUdeviceptr, *const c_void, usize, CUstream) -> CUresult;
    type Synchronize = unsafe extern "C" fn(CUstream) -> CUresult;
    type Fill = unsafe extern "C" fn(CUdeviceptr, u8, usize) -> CUresult;
    let library = stand_in::open();
    let driver = round_trip::start();
    let address = driver.mem_address_reserve(UNIT, 0, CUdeviceptr(0)).unwrap();
    map(&driver, address, round_trip::make(&driver));

    let mut own = CUstreamCaptureStatus(0);
    // SAFETY: the library exports the names in these signatures; the source outlives the wait.
    unsafe {
        let begin: unsafe extern "C" fn(CUstream, CUstreamCaptureMode) -> CUresult =
            std::mem::transmute(export(&library, c"cuStreamBeginCapture_v2_ptsz"));
        let end: unsafe extern "C" fn(CUstream, *mut CUgraph) -> CUresult =
            std::mem::transmute(export(&library, c"cuStreamEndCapture_ptsz"));
        assert_eq!(begin(CUstream::NULL, CUstreamCaptureMode::THREAD_LOCAL), CUresult::SUCCESS);
        let code = driver.raw().cuStreamIsCapturing(CUstream::PER_THREAD, &raw mut own);
        assert_eq!((code, own), (CUresult::SUCCESS, CUstreamCaptureStatus::ACTIVE));
        let mut graph = CUgraph::NULL;
        assert_eq!(end(CUstream::NULL, &raw mut graph), CUresult::SUCCESS);

        let copy: CopyOnStream = std::mem::transmute(export(&library, c"cuMemcpyHtoDAsync_v2_ptsz"));
        let synchronize: Synchronize = std::mem::transmute(export(&library, c"cuStreamSynchronize_ptsz"));
        let bytes = pattern(3);
        assert_eq!(copy(address, bytes.as_ptr().cast(), UNIT, CUstream::NULL), CUresult::SUCCESS);
        assert_eq!(synchronize(CUstream::NULL), CUresult::SUCCESS);
        assert!(read(&driver, address) == bytes);
        let fill: Fill = std::mem::transmute(export(&library, c"cuMemsetD8_v2_ptds"));
        assert_eq!(fill(address, 9, UNIT), CUresult::SUCCESS);
    }
    assert!(read(&driver, address) == [9; UNIT]);
}
