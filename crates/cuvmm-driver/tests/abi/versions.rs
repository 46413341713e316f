//! The CUDA version that each call is asked for by. A name may stand for several ABIs, and the resolver gives the
//! newest that is not above the version: one too high gives a function with other parameters.

use cuvmm_driver::Call;

/// Calls with more than one ABI in cudaTypedefs.h of CUDA 12.9 and 13.5: from which version on a name stands for
/// that of the list, and from which on for the next one.
const SEVERAL: &[(Call, i32, i32)] = &[
    (Call::cuGetProcAddress, 12000, i32::MAX),
    (Call::cuDeviceGetUuid, 11040, i32::MAX),
    (Call::cuDeviceTotalMem, 3020, i32::MAX),
    (Call::cuDevicePrimaryCtxRelease, 11000, i32::MAX),
    (Call::cuDevicePrimaryCtxReset, 11000, i32::MAX),
    (Call::cuCtxPushCurrent, 4000, i32::MAX),
    (Call::cuCtxPopCurrent, 4000, i32::MAX),
    (Call::cuCtxGetDevice, 2000, 13000),
    (Call::cuCtxSynchronize, 2000, 13000),
    (Call::cuCtxDestroy, 4000, i32::MAX),
    (Call::cuStreamDestroy, 4000, i32::MAX),
    (Call::cuStreamGetCaptureInfo, 11030, 12030),
    (Call::cuStreamBeginCapture, 10010, i32::MAX),
    (Call::cuStreamGetCtx, 9020, 12050),
    (Call::cuLaunchHostFunc, 10000, 13010),
    (Call::cuEventDestroy, 4000, i32::MAX),
    (Call::cuMemGetInfo, 3020, i32::MAX),
    (Call::cuMemAlloc, 3020, i32::MAX),
    (Call::cuMemFree, 3020, i32::MAX),
    (Call::cuMemcpyHtoD, 3020, i32::MAX),
    (Call::cuMemcpyDtoH, 3020, i32::MAX),
    (Call::cuMemcpyDtoD, 3020, i32::MAX),
    (Call::cuMemcpyHtoDAsync, 3020, i32::MAX),
    (Call::cuMemcpyDtoHAsync, 3020, i32::MAX),
    (Call::cuMemcpyDtoDAsync, 3020, i32::MAX),
    (Call::cuMemsetD8, 3020, i32::MAX),
    (Call::cuMemsetD16, 3020, i32::MAX),
    (Call::cuMemsetD32, 3020, i32::MAX),
    (Call::cuMemGetAddressRange, 3020, i32::MAX),
];

#[test]
fn each_version_asks_for_the_abi_of_the_list() {
    for (call, from, next) in SEVERAL {
        let version = call.symbol().version.0;
        assert!((*from..*next).contains(&version), "{call} is asked for by {version}, not {from}..{next}");
    }
}

/// A numbered export is the second ABI at least.
#[test]
fn every_numbered_export_is_known_to_have_several() {
    for call in Call::ALL {
        let symbol = call.symbol();
        let known = SEVERAL.iter().any(|(several, ..)| several == call);
        assert!(known || symbol.export == symbol.name, "{call} is exported as {:?}", symbol.export);
    }
}

/// A driver of CUDA 11.0 is loaded: what came later is optional.
#[test]
fn core_calls_ask_for_cuda_11_0_at_most() {
    for call in Call::ALL.iter().filter(|call| call.symbol().core) {
        assert!(call.symbol().version.0 <= 11000, "{call}");
    }
}
