//! The table: where its entry points come from, what is missing, and that arguments arrive as they were given.
//!
//! # Safety
//! The entry points are those of drivers in this file and in `support`, called with outputs that are ours.
#![allow(unsafe_code)]

mod support;

#[path = "../src/list.rs"]
mod list;

use std::ffi::{c_char, c_void};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use cuvmm_driver::sys::*;
use cuvmm_driver::{
    Call, Driver, Error, Failure, Hook, Hooked, Invocation, LoadError, MissingSymbol, RawDriver, Served, Symbol, Table,
    entry_point,
};
use support::Fake;

/// Serves [`Fake`].
struct Plain;

impl Served for Plain {
    fn served() -> &'static dyn RawDriver {
        static FAKE: LazyLock<Fake> = LazyLock::new(Fake::default);
        &*FAKE
    }
}

/// A table of the fake driver's entry points, without `absent`.
fn table_without(absent: &[Call]) -> Result<Table, MissingSymbol> {
    let mut source = |symbol: &Symbol| -> *const c_void {
        if absent.contains(&symbol.call) { std::ptr::null() } else { entry_point::<Plain>(symbol.call) }
    };
    // SAFETY: an entry point has its symbol's signature and lives as long as the program.
    unsafe { Table::from_source(&mut source) }
}

fn optional() -> impl Iterator<Item = Call> {
    Call::ALL.iter().copied().filter(|call| !call.symbol().core)
}

#[test]
fn each_missing_core_symbol_is_named() {
    let core: Vec<Call> = Call::ALL.iter().copied().filter(|call| call.symbol().core).collect();
    assert!(core.contains(&Call::cuMemMap) && core.contains(&Call::cuInit));
    for call in core {
        let missing = table_without(&[call]).err();
        assert_eq!(missing, Some(MissingSymbol { symbol: call.symbol() }), "{call}");
        let text = missing.map(|missing| missing.to_string());
        assert_eq!(text, Some(format!("no {call} (CUDA {})", call.symbol().version)));
    }
}

#[test]
fn each_missing_optional_symbol_is_known_beforehand() -> Result<(), MissingSymbol> {
    for call in optional() {
        let table = table_without(&[call])?;
        for other in Call::ALL {
            assert_eq!(table.provides(*other), *other != call, "{other} without {call}");
        }
        assert_eq!(format!("{table:?}"), format!("Table {{ missing: [{call}], .. }}"));
    }
    Ok(())
}

#[test]
fn a_complete_table_provides_everything() -> Result<(), MissingSymbol> {
    let table = table_without(&[])?;
    assert!(Call::ALL.iter().all(|call| table.provides(*call)));
    Ok(())
}

#[test]
fn what_the_driver_lacks_is_unsupported_when_called() -> Result<(), Box<dyn std::error::Error>> {
    let driver = Driver::new(table_without(&optional().collect::<Vec<_>>())?)?;
    let device = driver.device(0)?;
    let nothing = std::ptr::null_mut();
    let (graph, object, stream) = (CUgraph::NULL, CUuserObject::NULL, CUstream::NULL);
    let mut answers =
        vec![(Call::cuDeviceGetUuid, device.uuid().err()), (Call::cuGraphCreate, driver.graph_create().err())];
    macro_rules! call {
        ($name:ident, $call:expr) => {
            // SAFETY: the driver lacks the call, so that nothing is looked at.
            answers.push((Call::$name, unsafe { $call }.err()))
        };
    }
    call!(cuStreamGetCaptureInfo, driver.stream_get_capture_info(stream));
    call!(cuMemRetainAllocationHandle, driver.mem_retain_allocation_handle(CUdeviceptr(0)));
    call!(cuMemGetHandleForAddressRange, driver.mem_get_dma_buf(CUdeviceptr(0), 0));
    call!(cuUserObjectCreate, driver.user_object_create(nothing, None, 1));
    call!(cuUserObjectRetain, driver.user_object_retain(object, 1));
    call!(cuUserObjectRelease, driver.user_object_release(object, 1));
    call!(cuGraphRetainUserObject, driver.graph_retain_user_object(graph, object, 1));
    call!(cuGraphRetainUserObject, driver.graph_move_user_object(graph, object, 1));
    call!(cuGraphReleaseUserObject, driver.graph_release_user_object(graph, object, 1));
    call!(cuGraphDestroy, driver.graph_destroy(graph));
    call!(cuGraphInstantiateWithFlags, driver.graph_instantiate(graph));
    call!(cuGraphLaunch, driver.graph_launch(CUgraphExec::NULL, stream));
    call!(cuGraphExecDestroy, driver.graph_exec_destroy(CUgraphExec::NULL));
    call!(cuModuleLoadData, driver.module_load_data(c""));
    call!(cuModuleGetFunction, driver.module_get_function(CUmodule::NULL, c"f"));
    call!(cuModuleUnload, driver.module_unload(CUmodule::NULL));
    call!(cuLaunchKernel, driver.launch_kernel(CUfunction::NULL, [1; 3], [1; 3], 0, stream, &mut []));
    for (symbol, error) in answers {
        assert_eq!(error, Some(Error::Unsupported { symbol, since: symbol.symbol().version }));
    }
    Ok(())
}

/// A call that the driver has and refuses with the code of one that it lacks is told apart.
#[test]
fn what_the_driver_refuses_is_a_failure() -> Result<(), Box<dyn std::error::Error>> {
    let driver = Driver::new(table_without(&[])?)?;
    let error = driver.graph_create().err();
    assert_eq!(error.as_ref().and_then(Error::code), Some(CUresult::NOT_SUPPORTED));
    assert_eq!(error.as_ref().and_then(Error::call), Some(Call::cuGraphCreate));
    Ok(())
}

#[test]
fn a_file_that_is_no_library_is_not_loaded() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::temp_dir().join(format!("cuvmm-driver-no-library-{}", std::process::id()));
    std::fs::write(&path, "not a library")?;
    // SAFETY: the file is no library, so that nothing of it runs.
    let loaded = unsafe { Table::load_from(&path) };
    std::fs::remove_file(&path)?;
    let error = loaded.err().ok_or("it was loaded")?;
    assert!(matches!(&error, LoadError::LibraryNotFound { library, .. } if *library == path), "{error:?}");
    let text =
        format!("failed to open {}: there is no NVIDIA driver, or it is not where it is looked for", path.display());
    assert_eq!(error.to_string(), text);
    assert!(std::error::Error::source(&error).is_some(), "what the loader said is kept");
    Ok(())
}

#[test]
fn a_library_that_is_no_driver_lacks_the_first_core_symbol() -> Result<(), Box<dyn std::error::Error>> {
    // SAFETY: the C library is loaded already, and none of its functions is called.
    let error = unsafe { Driver::load_from("libc.so.6") }.err().ok_or("it was loaded")?;
    assert!(matches!(error, LoadError::MissingSymbol { symbol: Call::cuInit, .. }), "{error:?}");
    assert_eq!(error.to_string(), "libc.so.6 has no cuInit (CUDA 2.0): it is too old a CUDA driver, or none");
    Ok(())
}

/// What the recorder answers to every call.
const REFUSED: CUresult = CUresult(777);

static RECORDED: Mutex<Option<(Call, Vec<u64>)>> = Mutex::new(None);

fn recorded() -> MutexGuard<'static, Option<(Call, Vec<u64>)>> {
    RECORDED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes each call and makes none.
struct Recorder;

impl Hook for Recorder {
    fn before(&self, invocation: &Invocation<'_>) -> Option<Failure> {
        *recorded() = Some((invocation.call, invocation.arguments.to_vec()));
        Failure::new(REFUSED)
    }
}

/// Serves the recorder.
struct Recording;

impl Served for Recording {
    fn served() -> &'static dyn RawDriver {
        static HOOKED: LazyLock<Hooked<Fake, Recorder>> = LazyLock::new(|| Hooked::new(Fake::default(), Recorder));
        &*HOOKED
    }
}

/// An argument that no other has, and its bits.
trait Sample: Sized {
    fn sample(seed: u64) -> (Self, u64);
}

macro_rules! samples {
    (number: $($ty:ty)*) => {$(
        impl Sample for $ty {
            fn sample(seed: u64) -> (Self, u64) {
                let value = (u64::MAX - seed) as $ty;
                (value, value as u64)
            }
        }
    )*};
    (newtype: $($ty:ident)*) => {$(
        impl Sample for $ty {
            fn sample(seed: u64) -> (Self, u64) {
                let (value, bits) = Sample::sample(seed);
                (Self(value), bits)
            }
        }
    )*};
}

samples!(number: i32 u8 u16 u32 u64 usize);
samples!(newtype: CUresult CUdevice CUdeviceptr CUmemGenericAllocationHandle CUdevice_attribute CUdevice_P2PAttribute
    CUpointer_attribute CUstream_flags CUevent_flags CUstreamCaptureMode CUmemAllocationHandleType
    CUmemAllocationGranularity_flags CUmemRangeHandleType CUflushGPUDirectRDMAWritesTarget
    CUflushGPUDirectRDMAWritesScope CUcontext CUstream CUevent CUgraph CUgraphExec CUuserObject CUmodule CUfunction);

impl<T> Sample for *const T {
    fn sample(seed: u64) -> (Self, u64) {
        let address = usize::MAX - seed as usize;
        (std::ptr::without_provenance(address), address as u64)
    }
}

impl<T> Sample for *mut T {
    fn sample(seed: u64) -> (Self, u64) {
        let address = usize::MAX - seed as usize;
        (std::ptr::without_provenance_mut(address), address as u64)
    }
}

unsafe extern "C" fn host_function(_: *mut c_void) {}

impl Sample for CUhostFn {
    fn sample(_: u64) -> (Self, u64) {
        (Some(host_function), host_function as unsafe extern "C" fn(*mut c_void) as usize as u64)
    }
}

macro_rules! pass_each {
    ($($kind:ident $name:ident $export:literal $version:literal ($($arg:ident: $ty:ty),*);)*) => {
        /// Calls each entry of `table` with arguments of its own, and sees them arrive at the driver.
        fn pass_each(table: &Table) {
            let mut seed = 0;
            $({
                $(
                    seed += 1;
                    let $arg = <$ty as Sample>::sample(seed);
                )*
                let expected: Vec<u64> = vec![$($arg.1),*];
                // SAFETY: the call stops at the hook, which looks at no argument.
                let code = unsafe { table.$name($($arg.0),*) };
                assert_eq!(code, REFUSED, "{}", stringify!($name));
                assert_eq!(recorded().take(), Some((Call::$name, expected)));
            })*
            assert!(seed > 0);
        }
    };
}

list::for_each_call!(pass_each);

/// From a table through C entry points and a decorator to a driver, and back.
#[test]
fn arguments_and_results_pass_through_unchanged() -> Result<(), MissingSymbol> {
    let mut source = |symbol: &Symbol| entry_point::<Recording>(symbol.call);
    // SAFETY: an entry point has its symbol's signature and lives as long as the program.
    let table = unsafe { Table::from_source(&mut source) }?;
    pass_each(&table);
    Ok(())
}

#[test]
fn symbols_are_those_of_the_list() {
    macro_rules! symbols {
        ($($kind:ident $name:ident $export:literal $version:literal $arguments:tt;)*) => {
            [$((stringify!($kind), stringify!($name), $export, $version)),*]
        };
    }
    let list = list::for_each_call!(symbols);
    assert_eq!(list.len(), Call::ALL.len());
    for ((kind, name, export, version), call) in list.into_iter().zip(Call::ALL) {
        let symbol = call.symbol();
        assert_eq!((call.name(), symbol.call), (name, *call));
        assert_eq!(symbol.name.to_bytes(), name.as_bytes());
        assert_eq!(symbol.export.to_bytes(), export.as_bytes());
        assert_eq!((symbol.version, symbol.core), (CudaVersion(version), kind == "core"));
    }
}
