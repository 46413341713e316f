//! What usually cures a `no`.

use cuvmm::{CUresult, Call, LoadError};

use super::report::Culprit;

/// What usually cures the `no` of the row `id`, where that is known.
pub(super) fn cure(id: &str, culprit: Culprit) -> Option<String> {
    let (Some(call), code) = (culprit.call, culprit.code) else { return None };
    let cure = if id.starts_with("host") && (call, code) == (Call::cuMemCreate, Some(CUresult::OUT_OF_MEMORY)) {
        Some("the node has no memory, or none left: take another; `numactl --hardware` lists them")
    } else {
        of_everything(call, code).or_else(|| of_one(id, call, code))
    };
    cure.map(str::to_owned)
}

/// What has one cure, whatever was tried.
fn of_everything(call: Call, code: Option<CUresult>) -> Option<&'static str> {
    match (call, code) {
        (Call::cuInit, Some(code)) => of_start(code),
        (_, Some(CUresult::SYSTEM_NOT_READY)) => of_start(CUresult::SYSTEM_NOT_READY),
        (Call::cuDevicePrimaryCtxRetain, Some(CUresult::OUT_OF_MEMORY)) => {
            Some("a context needs some hundred MiB of the device's memory: see with `nvidia-smi` who holds it")
        }
        (Call::cuDevicePrimaryCtxRetain, _) => Some(
            "the compute mode may forbid contexts, or another process have the only one: `nvidia-smi -c 0` as root",
        ),
        (Call::cuMemAddressReserve, Some(CUresult::OUT_OF_MEMORY)) => {
            Some("this process has no addresses left: raise `ulimit -v`; on WSL, Windows bounds them")
        }
        (Call::cuMemExportToShareableHandle, Some(CUresult::OPERATING_SYSTEM)) => {
            Some("this process has no open file left: each exported chunk takes one; raise `ulimit -n`")
        }
        (Call::cuMemCreate, Some(CUresult::OUT_OF_MEMORY)) => {
            Some("there is no memory left: see with `nvidia-smi` who holds it, and which quota a container or MPS sets")
        }
        _ => None,
    }
}

fn of_one(id: &str, call: Call, code: Option<CUresult>) -> Option<&'static str> {
    let row = id.trim_end_matches(|letter: char| letter.is_ascii_digit());
    match (row, call, code) {
        ("memory", Call::cuMemCreate, _) => Some(
            "this device, or what it is passed through by, has no virtual memory management: a driver of CUDA 11.0 or later and no sandbox between are needed",
        ),
        ("posix_fd", Call::cuMemCreate, _) => {
            Some("WSL and some sandboxes refuse memory that can be exported: use it unshared (`HandleKind::None`)")
        }
        ("posix_fd", Call::cuMemExportToShareableHandle | Call::cuMemImportFromShareableHandle, _) => Some(
            "a sandbox (gVisor, a seccomp profile) may block the driver's ioctl for it: run outside of it, or unshared",
        ),
        ("fabric", Call::cuMemCreate, Some(CUresult::NOT_PERMITTED | CUresult::NOT_SUPPORTED)) => Some(
            "no IMEX channel: as root `nvidia-modprobe -c 0`, or mknod /dev/nvidia-caps-imex-channels/channel0 with the major number in /proc/devices; a container must be given the node",
        ),
        ("fabric", Call::cuMemCreate, _) => {
            Some("fabric handles need a driver of CUDA 12.3 or later and an NVLink fabric")
        }
        (
            "fabric",
            Call::cuMemExportToShareableHandle
            | Call::cuMemImportFromShareableHandle
            | Call::cuMemMap
            | Call::cuMemSetAccess,
            _,
        ) => Some(
            "both sides need the same IMEX channel and clique: see `nvidia-imex-ctl -N` and the fabric state in `nvidia-smi -q`",
        ),
        ("rdma", Call::cuMemCreate, _) => Some(
            "integrated GPUs, and some systems that GPUs are passed to, have no GPUDirect RDMA for this memory: make it without the flag",
        ),
        ("compression", Call::cuMemCreate | Call::cuMemGetAllocationPropertiesFromHandle, _) => {
            Some("this device can't compress, or has no room for it left: memory without it works the same")
        }
        ("dma_buf", Call::cuMemGetHandleForAddressRange, _) => Some(
            "dma-bufs need a driver of CUDA 11.7 or later, NVIDIA's open kernel modules and Linux 5.12; MIG instances and integrated GPUs have none",
        ),
        ("peer_", Call::cuMemSetAccess | Call::cuDeviceCanAccessPeer, _) => Some(
            "there is no peer path: see `nvidia-smi topo -p2p r`; MIG instances never have one, virtual machines and the IOMMU may block it",
        ),
        ("host", Call::cuMemCreate, Some(CUresult::INVALID_VALUE | CUresult::NOT_SUPPORTED)) => {
            Some("host memory without a node needs a driver of CUDA 13.0 (580) or later: use a node's")
        }
        ("host" | "host_node_", Call::cuMemCreate, _) => Some(
            "needs a driver of CUDA 12.2 or later, a node with memory, and in a container `--cap-add SYS_NICE` (Docker's seccomp profile gates mbind behind it)",
        ),
        ("host" | "host_node_", Call::cuMemSetAccess, _) => {
            Some("drivers of CUDA 12.2 and 12.3 need a context on every device for this: update to 12.4 (550) or later")
        }
        (_, _, None) if code.is_none() && call.symbol().version > cuvmm::CudaVersion(11000) => {
            Some("the driver is older than the call: update it")
        }
        _ => None,
    }
}

/// What cures a driver that does not start.
fn of_start(code: CUresult) -> Option<&'static str> {
    match code {
        CUresult::NO_DEVICE => Some(
            "there is a driver and no GPU that this process may use: look at CUDA_VISIBLE_DEVICES, at `nvidia-smi`, and in a container at `--gpus all`",
        ),
        CUresult::STUB_LIBRARY => Some(
            "this is the CUDA toolkit's stub: take its folder out of LD_LIBRARY_PATH, so that the driver's own is found",
        ),
        CUresult::OPERATING_SYSTEM => Some(
            "the system refused the driver a call: a seccomp profile may block memfd_create, or a limit be reached",
        ),
        CUresult::SYSTEM_NOT_READY => Some(
            "NVSwitch hosts need the fabric manager: `systemctl start nvidia-fabricmanager`, of the driver's own version",
        ),
        CUresult::SYSTEM_DRIVER_MISMATCH => Some(
            "the library is not of the kernel driver's version: restart the machine after an update; in a container, use the host's library",
        ),
        CUresult::COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            Some("the forward-compatibility library does not serve this GPU: take it out of LD_LIBRARY_PATH")
        }
        CUresult::DEVICE_UNAVAILABLE => Some("another process has the device for itself: `nvidia-smi -c 0` as root"),
        CUresult::UNKNOWN => Some(
            "often /dev/nvidia-uvm is missing or the kernel module is broken: `nvidia-modprobe -u -c 0` as root, then `dmesg`",
        ),
        _ => None,
    }
}

/// What cures a driver that can't be loaded.
pub(super) fn of_load(error: &LoadError) -> Option<String> {
    match error {
        LoadError::LibraryNotFound { .. } => Some(
            "install NVIDIA's driver; in a container, have the host's passed in (`--gpus all` with the NVIDIA container toolkit)"
                .to_owned(),
        ),
        LoadError::MissingSymbol { .. } => {
            Some("update NVIDIA's driver: CUDA 11.0 (branch 450) is the least, and sharing needs 11.4 (470)".to_owned())
        }
        LoadError::Init(error) => cure("start", Culprit { call: error.call(), code: error.code() }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_to_fail_has_a_cure_that_names_what_to_change() {
        let check = |id, call, code, word: &str| {
            let told = cure(id, Culprit { call: Some(call), code: Some(code) });
            assert!(told.as_ref().is_some_and(|told| told.contains(word)), "{id} {call} {code}: {told:?}");
        };
        check("fabric", Call::cuMemCreate, CUresult::NOT_PERMITTED, "IMEX");
        check("fabric", Call::cuMemMap, CUresult::NOT_PERMITTED, "fabric state");
        check("posix_fd", Call::cuMemCreate, CUresult::INVALID_DEVICE, "WSL");
        check("posix_fd", Call::cuMemExportToShareableHandle, CUresult::OPERATING_SYSTEM, "ulimit -n");
        check("host_node_1", Call::cuMemCreate, CUresult::INVALID_VALUE, "SYS_NICE");
        check("host", Call::cuMemCreate, CUresult::INVALID_VALUE, "13.0");
        check("host_node_3", Call::cuMemCreate, CUresult::OUT_OF_MEMORY, "numactl");
        check("memory", Call::cuMemCreate, CUresult::OUT_OF_MEMORY, "nvidia-smi");
        check("peer_3", Call::cuMemSetAccess, CUresult::INVALID_VALUE, "MIG");
        check("memory", Call::cuMemAddressReserve, CUresult::OUT_OF_MEMORY, "ulimit -v");
        check("start", Call::cuInit, CUresult::SYSTEM_NOT_READY, "fabric manager");
        check("start", Call::cuInit, CUresult::NO_DEVICE, "CUDA_VISIBLE_DEVICES");
    }

    #[test]
    fn what_is_not_known_has_none() {
        assert_eq!(cure("memory", Culprit::default()), None);
        let odd = Culprit { call: Some(Call::cuMemUnmap), code: Some(CUresult::UNKNOWN) };
        assert_eq!(cure("memory", odd), None);
    }
}
