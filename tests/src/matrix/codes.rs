//! The codes that the driver may answer, by call.

use cuvmm::{CUresult, Call};

/// What any call may answer, whatever its documentation lists: that the driver is not started or has ended, that the
/// system refused, that earlier work was broken, and whatever else.
const ANY: [CUresult; 6] = [
    CUresult::NOT_INITIALIZED,
    CUresult::DEINITIALIZED,
    CUresult::OPERATING_SYSTEM,
    CUresult::ILLEGAL_ADDRESS,
    CUresult::LAUNCH_FAILED,
    CUresult::UNKNOWN,
];

/// The codes that a call may answer: those that the driver's header documents for it, and those that drivers were seen
/// to answer.
pub fn codes(call: Call) -> Vec<CUresult> {
    documented(call).iter().copied().chain(ANY).collect()
}

/// A few of them.
pub fn sample(call: Call) -> Vec<CUresult> {
    let first = documented(call).first().copied();
    first.into_iter().chain([CUresult::ILLEGAL_ADDRESS, CUresult::UNKNOWN]).collect()
}

fn documented(call: Call) -> &'static [CUresult] {
    use CUresult as Code;
    const INVALID: [CUresult; 3] = [Code::INVALID_VALUE, Code::NOT_PERMITTED, Code::NOT_SUPPORTED];
    match call {
        Call::cuMemAddressReserve => {
            &[Code::OUT_OF_MEMORY, Code::INVALID_VALUE, Code::NOT_PERMITTED, Code::NOT_SUPPORTED]
        }
        Call::cuMemAddressFree | Call::cuMemRelease | Call::cuMemUnmap => &INVALID,
        Call::cuMemGetAllocationGranularity
        | Call::cuMemGetAllocationPropertiesFromHandle
        | Call::cuMemRetainAllocationHandle => &INVALID,
        Call::cuMemCreate | Call::cuMemMap => {
            &[Code::OUT_OF_MEMORY, Code::INVALID_VALUE, Code::INVALID_DEVICE, Code::NOT_PERMITTED, Code::NOT_SUPPORTED]
        }
        // 2 on Windows, 217 where a card has no way to a peer, and 600 under WSL, were seen and are not listed.
        Call::cuMemSetAccess => &[
            Code::INVALID_VALUE,
            Code::OUT_OF_MEMORY,
            Code::INVALID_DEVICE,
            Code::PEER_ACCESS_UNSUPPORTED,
            Code::NOT_READY,
            Code::NOT_SUPPORTED,
        ],
        Call::cuMemGetAccess => &[Code::INVALID_VALUE, Code::INVALID_DEVICE, Code::NOT_PERMITTED, Code::NOT_SUPPORTED],
        Call::cuMemExportToShareableHandle => &INVALID,
        Call::cuMemImportFromShareableHandle => {
            &[Code::INVALID_VALUE, Code::INVALID_DEVICE, Code::INVALID_HANDLE, Code::NOT_PERMITTED, Code::NOT_SUPPORTED]
        }
        Call::cuPointerGetAttribute | Call::cuDeviceGetAttribute => {
            &[Code::INVALID_VALUE, Code::INVALID_DEVICE, Code::INVALID_CONTEXT]
        }
        Call::cuDeviceGetUuid | Call::cuDeviceCanAccessPeer => &[Code::INVALID_VALUE, Code::INVALID_DEVICE],
        Call::cuMemGetInfo => &[Code::INVALID_VALUE, Code::INVALID_CONTEXT],
        Call::cuDevicePrimaryCtxGetState => &[Code::INVALID_VALUE, Code::INVALID_DEVICE],
        Call::cuDevicePrimaryCtxRetain => {
            &[Code::OUT_OF_MEMORY, Code::INVALID_VALUE, Code::INVALID_DEVICE, Code::INVALID_CONTEXT]
        }
        Call::cuDevicePrimaryCtxRelease => &[Code::INVALID_DEVICE, Code::INVALID_CONTEXT],
        // 800 in a host function, as measured.
        Call::cuCtxGetCurrent => &[Code::NOT_PERMITTED],
        Call::cuCtxPushCurrent => &[Code::INVALID_VALUE, Code::INVALID_CONTEXT, Code::CONTEXT_IS_DESTROYED],
        Call::cuCtxPopCurrent => &[Code::INVALID_CONTEXT],
        Call::cuThreadExchangeStreamCaptureMode => &[Code::INVALID_VALUE],
        Call::cuUserObjectCreate | Call::cuGraphRetainUserObject | Call::cuUserObjectRelease => &[Code::INVALID_VALUE],
        Call::cuStreamIsCapturing | Call::cuStreamGetCaptureInfo => {
            &[Code::INVALID_VALUE, Code::STREAM_CAPTURE_IMPLICIT]
        }
        Call::cuStreamSynchronize => &[
            Code::INVALID_HANDLE,
            Code::INVALID_CONTEXT,
            Code::CONTEXT_IS_DESTROYED,
            Code::STREAM_CAPTURE_UNSUPPORTED,
            Code::STREAM_CAPTURE_INVALIDATED,
        ],
        // 600 is no failure: it says that the work goes on.
        Call::cuEventSynchronize | Call::cuEventQuery => &[
            Code::INVALID_HANDLE,
            Code::INVALID_CONTEXT,
            Code::CONTEXT_IS_DESTROYED,
            Code::STREAM_CAPTURE_UNSUPPORTED,
            Code::CAPTURED_EVENT,
        ],
        Call::cuEventDestroy => &[Code::INVALID_HANDLE, Code::INVALID_CONTEXT],
        Call::cuEventCreate | Call::cuStreamCreate => {
            &[Code::OUT_OF_MEMORY, Code::INVALID_VALUE, Code::INVALID_CONTEXT, Code::EXTERNAL_DEVICE]
        }
        Call::cuEventRecord | Call::cuMemcpyHtoDAsync | Call::cuMemcpyDtoHAsync | Call::cuMemsetD8Async => {
            &[Code::INVALID_VALUE, Code::INVALID_CONTEXT, Code::INVALID_HANDLE]
        }
        call => panic!("the codes of {call} are not listed"),
    }
}
