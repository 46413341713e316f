//! Machines that are ready to be used.

use cuvmm_driver::sys::*;

use crate::machine::{DeviceModel, Hints, Machine, NumaNode};
use crate::policy::Preset;

const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;

type Make = fn() -> Machine;

impl Machine {
    /// The machines that are ready, each with its name; the default is the first.
    ///
    /// ```
    /// use cuvmm_sim::Machine;
    ///
    /// let (name, machine) = Machine::NAMED[0];
    /// assert_eq!((name, machine().devices.len()), ("h200", 1));
    /// ```
    pub const NAMED: [(&'static str, Make); 4] =
        [("h200", Self::h200), ("h200_pair", Self::h200_pair), ("small", Self::small), ("odd", Self::odd)];

    /// The machine of that name, if it is one of [`NAMED`](Self::NAMED).
    pub fn named(name: &str) -> Option<Self> {
        let found = Self::NAMED.into_iter().find(|(known, _)| *known == name);
        found.map(|(_, machine)| machine())
    }

    /// One H200, on a host with one NUMA node and no IMEX channel.
    pub fn h200() -> Self {
        Self {
            devices: vec![DeviceModel::h200(0)],
            granularity: |_, _| 2 * MIB,
            reservation_unit: 2 * MIB,
            numa_nodes: vec![NumaNode { id: 0, memory: 512 * GIB }],
            imex: false,
            driver_version: CudaVersion(13000),
            preset: Preset::Strict,
            hints: Hints::ByPreset,
            rdma_grants: None,
            compresses: true,
            address_window: None,
            open_files: None,
            poison: Some(0xA5),
            latency: None,
            manual_streams: false,
        }
    }

    /// Two H200s that reach each other.
    pub fn h200_pair() -> Self {
        let mut devices = [DeviceModel::h200(0), DeviceModel::h200(1)];
        link(&mut devices, 0, 1);
        Self { devices: devices.into(), ..Self::h200() }
    }

    /// A device with 1 GiB of memory and a granularity of 64 KiB, so that thousands of chunks are cheap.
    pub fn small() -> Self {
        let device = DeviceModel { name: "Simulated small device".into(), total_memory: GIB, ..DeviceModel::h200(0) };
        Self {
            devices: vec![device],
            granularity: |_, _| 64 << 10,
            reservation_unit: 64 << 10,
            numa_nodes: vec![NumaNode { id: 0, memory: 4 * GIB }],
            hints: Hints::Granted,
            ..Self::h200()
        }
    }

    /// Three small devices of which nothing may be taken for granted:
    ///
    /// - The granularity is another one for each location and handle type: 1 MiB of device memory that isn't shared,
    ///   2 MiB by file descriptor, 32 MiB by fabric handle, 64 KiB of the host's; what is recommended is twice as much.
    /// - Devices 0 and 1 reach each other, device 2 reaches nobody. They have odd sizes, no RDMA and no compression.
    /// - NUMA nodes 1 and 3, of which 3 has no memory, and an IMEX channel.
    pub fn odd() -> Self {
        let mut devices = [
            DeviceModel::odd(0, 3 * GIB + 7 * MIB + 4096),
            DeviceModel::odd(1, GIB + 333 * MIB),
            DeviceModel::odd(2, 600 * MIB + 12288),
        ];
        link(&mut devices, 0, 1);
        Self {
            devices: devices.into(),
            granularity: odd_granularity,
            numa_nodes: vec![NumaNode { id: 1, memory: 3 * GIB }, NumaNode { id: 3, memory: 0 }],
            imex: true,
            hints: Hints::Granted,
            ..Self::h200()
        }
    }
}

/// Lets two devices reach each other.
fn link(devices: &mut [DeviceModel], one: usize, other: usize) {
    let (first, second) = (devices[one].uuid, devices[other].uuid);
    devices[one].peers.push(second);
    devices[other].peers.push(first);
}

fn odd_granularity(properties: &CUmemAllocationProp, option: CUmemAllocationGranularity_flags) -> usize {
    let kinds = properties.requested_handle_types;
    let least = match properties.location.location_type {
        CUmemLocationType::HOST | CUmemLocationType::HOST_NUMA => 64 << 10,
        _ if kinds.0 & CUmemAllocationHandleType::FABRIC.0 != 0 => 32 * MIB,
        _ if kinds.0 & CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR.0 != 0 => 2 * MIB,
        _ => MIB,
    };
    if option == CUmemAllocationGranularity_flags::RECOMMENDED { 2 * least } else { least }
}

impl DeviceModel {
    /// An H200; `index` tells several apart.
    pub fn h200(index: u8) -> Self {
        let mut uuid = *b"cuvmm-sim/h200/\0";
        uuid[15] = index;
        let attributes = [
            (33, 0x1b + i32::from(index)),
            (41, 1),
            (75, 9),
            (76, 0),
            (83, 1),
            (89, 1),
            (102, 1),
            (103, 1),
            (107, 1),
            (110, 1),
            (115, 1),
            (116, 1),
            (117, 1),
            (118, 100),
            (119, 9),
            (124, 1),
            (125, 1),
            (128, 1),
            (131, -1),
            (132, 1),
            (134, 0),
            (141, 1),
            (142, 1),
            (144, 1),
            (145, 1),
        ];
        Self {
            name: "Simulated H200".into(),
            uuid: CUuuid { bytes: uuid },
            total_memory: 150_109_880_320,
            attributes: attributes.into(),
            peers: Vec::new(),
        }
    }

    /// A device of [`Machine::odd`]; `index` tells several apart.
    fn odd(index: u8, total_memory: usize) -> Self {
        let mut uuid = *b"cuvmm-sim/odd/ \0";
        uuid[15] = index;
        let mut device = Self::h200(index);
        let absent = [
            CUdevice_attribute::GENERIC_COMPRESSION_SUPPORTED,
            CUdevice_attribute::GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
            CUdevice_attribute::GPU_DIRECT_RDMA_SUPPORTED,
            FLUSH_WRITES_OPTIONS,
            CUdevice_attribute::DMA_BUF_SUPPORTED,
        ];
        device.attributes.extend(absent.map(|attribute| (attribute.0, 0)));
        device.attributes.insert(CUdevice_attribute::HOST_NUMA_ID.0, 1);
        Self { name: "Simulated odd device".into(), uuid: CUuuid { bytes: uuid }, total_memory, ..device }
    }
}

/// Which flushes of RDMA writes a device has.
pub(crate) const FLUSH_WRITES_OPTIONS: CUdevice_attribute = CUdevice_attribute(117);
