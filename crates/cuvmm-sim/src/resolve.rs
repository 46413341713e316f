//! Finding the C entry point of a call by its name, as cuGetProcAddress does.

use std::ffi::{CStr, c_void};

use cuvmm_driver::sys::{CUdriverProcAddressQueryResult, CudaVersion};
use cuvmm_driver::{CUresult, Call, RawDriver, Served, entry_point};

use crate::session::Answer;
use crate::simulator::Simulator;

/// Where the C entry point of a call is.
pub(crate) type EntryPoint = fn(Call) -> *const c_void;

/// The one flag that changes anything: default streams are the thread's own.
const PER_THREAD_DEFAULT_STREAM: u64 = 2;

impl Simulator {
    /// Lets cuGetProcAddress give out the C entry points that serve `D`, which is to be this simulator: C functions
    /// carry no value, so a simulator by itself has none, and then lacks that call. The first `D` stays.
    ///
    /// ```
    /// use std::sync::LazyLock;
    ///
    /// use cuvmm_driver::sys::{CUdriverProcAddressQueryResult, CudaVersion};
    /// use cuvmm_driver::{RawDriver, Served};
    /// use cuvmm_sim::{Machine, Simulator};
    ///
    /// static DRIVER: LazyLock<Simulator> = LazyLock::new(|| {
    ///     let simulator = Simulator::new(Machine::h200());
    ///     simulator.serve::<TheDriver>();
    ///     simulator
    /// });
    ///
    /// struct TheDriver;
    ///
    /// impl Served for TheDriver {
    ///     fn served() -> &'static dyn RawDriver {
    ///         &*DRIVER
    ///     }
    /// }
    ///
    /// let (address, status) = DRIVER.resolve(c"cuMemMap", CudaVersion(10020), 0).unwrap();
    /// assert!(!address.is_null());
    /// assert_eq!(status, CUdriverProcAddressQueryResult::SUCCESS);
    /// ```
    pub fn serve<D: Served>(&self) {
        let _ = self.shared().entry_points.set(entry_point::<D>);
    }

    /// What cuGetProcAddress answers to a name, without its `_v2`, in the signature of a version: the address of the
    /// entry point, or null and why there is none.
    ///
    /// A call that a driver of that version has in another signature than the list's is not found, nor is a
    /// per-thread form where `flags` asks for it.
    ///
    /// # Errors
    /// 1 for a version above the driver's and for unknown flags, 801 where nothing is [served](Self::serve).
    pub fn resolve(
        &self,
        name: &CStr,
        version: CudaVersion,
        flags: u64,
    ) -> Result<(*const c_void, CUdriverProcAddressQueryResult), CUresult> {
        let Some(entry_point) = self.shared().entry_points.get() else { return Err(CUresult::NOT_SUPPORTED) };
        let null = std::ptr::null();
        Ok(match self.named(name.to_bytes(), version, flags)? {
            Found::Call(call) => (entry_point(call), CUdriverProcAddressQueryResult::SUCCESS),
            Found::TooNew => (null, CUdriverProcAddressQueryResult::VERSION_NOT_SUFFICIENT),
            Found::Nothing => (null, CUdriverProcAddressQueryResult::SYMBOL_NOT_FOUND),
        })
    }

    fn named(&self, name: &[u8], version: CudaVersion, flags: u64) -> Answer<Found> {
        if version > self.machine().driver_version || flags > PER_THREAD_DEFAULT_STREAM {
            return Err(CUresult::INVALID_VALUE);
        }
        let Some(&call) = Call::ALL.iter().find(|call| call.name().as_bytes() == name) else {
            return Ok(Found::Nothing);
        };
        let version = version.0;
        let differs = foreign(call).iter().any(|&(from, until)| (from..until).contains(&version));
        Ok(match () {
            () if differs => Found::Nothing,
            () if version < call.symbol().version.0 => Found::TooNew,
            () if flags == PER_THREAD_DEFAULT_STREAM && has_per_thread_form(call) => Found::Nothing,
            // A driver without a core call is of no use, so those that aren't modelled answer for themselves.
            () if call.symbol().core || self.provides(call) => Found::Call(call),
            () => Found::Nothing,
        })
    }
}

/// What a name stands for.
enum Found {
    Call(Call),
    /// A call that came after the version asked for.
    TooNew,
    /// No call, or one in a signature that is not the list's.
    Nothing,
}

/// The versions, from and until, for which a real driver gives out another function of that name than the list's.
fn foreign(call: Call) -> &'static [(i32, i32)] {
    const LAST: i32 = i32::MAX;
    match call {
        // Four arguments.
        Call::cuGetProcAddress => &[(11030, 12000)],
        // A context as an argument.
        Call::cuCtxGetDevice | Call::cuCtxSynchronize => &[(13000, LAST)],
        // A fourth argument.
        Call::cuLaunchHostFunc => &[(13010, LAST)],
        // A third argument.
        Call::cuStreamGetCtx => &[(12050, LAST)],
        // Three arguments, and seven.
        Call::cuStreamGetCaptureInfo => &[(10010, 11030), (12030, LAST)],
        // Without a mode.
        Call::cuStreamBeginCapture => &[(10000, 10010)],
        // The whole device's, where it is divided.
        Call::cuDeviceGetUuid => &[(9020, 11040)],
        // With other effects on contexts, streams and events in use.
        Call::cuCtxDestroy
        | Call::cuCtxPushCurrent
        | Call::cuCtxPopCurrent
        | Call::cuStreamDestroy
        | Call::cuEventDestroy => &[(2000, 4000)],
        Call::cuDevicePrimaryCtxRelease | Call::cuDevicePrimaryCtxReset => &[(7000, 11000)],
        // Addresses and sizes of 32 bits.
        Call::cuDeviceTotalMem
        | Call::cuMemGetInfo
        | Call::cuMemAlloc
        | Call::cuMemFree
        | Call::cuMemGetAddressRange
        | Call::cuMemcpyHtoD
        | Call::cuMemcpyDtoH
        | Call::cuMemcpyDtoD
        | Call::cuMemcpyHtoDAsync
        | Call::cuMemcpyDtoHAsync
        | Call::cuMemcpyDtoDAsync
        | Call::cuMemsetD8
        | Call::cuMemsetD16
        | Call::cuMemsetD32 => &[(2000, 3020)],
        _ => &[],
    }
}

/// Whether a call reads the default stream, so that a driver has it a second time for threads with their own: it is
/// given a stream, or does work without one.
fn has_per_thread_form(call: Call) -> bool {
    let takes_a_stream = call.parameters().iter().any(|parameter| parameter.type_name == "CUstream");
    let is_work = ["cuMemcpy", "cuMemset"].iter().any(|work| call.name().starts_with(work));
    // No default stream is destroyed.
    (takes_a_stream && call != Call::cuStreamDestroy) || is_work
}
