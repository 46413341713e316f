//! [`Machine`]: what a simulated driver finds when it starts.

use std::collections::BTreeMap;

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;

use crate::policy::Preset;

/// One MiB.
const MIB: usize = 1 << 20;
/// One GiB.
const GIB: usize = 1 << 30;

/// How much the sizes and addresses of such memory must be multiples of: a function of the whole property struct.
pub type Granularity = fn(&CUmemAllocationProp, CUmemAllocationGranularity_flags) -> usize;

/// A machine: devices, host nodes, limits, and the driver's version and habits. Plain options; the default is
/// [`Machine::h200`].
///
/// ```
/// use cuvmm_sim::{Machine, Preset, Simulator};
///
/// let machine = Machine::h200_pair().preset(Preset::Measured).driver_version(12020);
/// assert_eq!(Simulator::new(machine).driver()?.device_count(), 2);
/// # Ok::<(), cuvmm_driver::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Machine {
    /// The devices, by ordinal.
    pub devices: Vec<DeviceModel>,
    /// The granularity of each kind of memory.
    pub granularity: Granularity,
    /// What sizes of reservations must be multiples of, and the least that their addresses are aligned to.
    pub reservation_unit: usize,
    /// The host's NUMA nodes; none for a host without NUMA, whose memory is then node 0.
    pub numa_nodes: Vec<NumaNode>,
    /// Whether there is an IMEX channel, without which fabric handles are not permitted.
    pub imex: bool,
    /// The driver's version: it hides later entry points and attributes.
    pub driver_version: CudaVersion,
    /// Which choices the driver makes where the documentation leaves one.
    pub preset: Preset,
    /// What becomes of a hinted reservation.
    pub hints: Hints,
    /// The most bytes that may be reserved at once; none for as much as the process can have.
    pub address_window: Option<u64>,
    /// What every byte of fresh device memory reads as; none for zero.
    pub poison: Option<u8>,
}

/// A device of a [`Machine`].
#[derive(Clone, Debug)]
pub struct DeviceModel {
    /// Its name.
    pub name: String,
    /// Its identity, the same in every process that has it in its machine.
    pub uuid: CUuuid,
    /// Its memory, in bytes.
    pub total_memory: usize,
    /// Its attributes by number. What is not listed reads 0 if the driver's version knows it.
    pub attributes: BTreeMap<u32, i32>,
    /// The devices whose memory it reaches, besides its own.
    pub peers: Vec<CUuuid>,
}

/// A NUMA node of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// Its number.
    pub id: i32,
    /// Its memory, in bytes: 0 for a node without any.
    pub memory: usize,
}

/// What becomes of a reservation with a valid hint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hints {
    /// As [`Granted`](Self::Granted) with [`Preset::Strict`], and as [`Arenas`](Self::Arenas) with
    /// [`Preset::Measured`].
    ByPreset,
    /// It gets exactly that address if it is free, and another one if not.
    Granted,
    /// It always gets another address.
    Elsewhere,
    /// As a measured H200 has it: while a context is active, what is smaller than 30 MiB shares regions with its like
    /// and always gets another address; all else is as [`Granted`](Self::Granted).
    Arenas,
    /// The call fails, as some drivers have it.
    Refused(CUresult),
}

impl Default for Machine {
    fn default() -> Self {
        Self::h200()
    }
}

impl Machine {
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
            address_window: None,
            poison: Some(0xA5),
        }
    }

    /// Two H200s that reach each other.
    pub fn h200_pair() -> Self {
        let mut devices = [DeviceModel::h200(0), DeviceModel::h200(1)];
        devices[0].peers.push(devices[1].uuid);
        devices[1].peers.push(devices[0].uuid);
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

    /// With those habits.
    #[must_use]
    pub fn preset(self, preset: Preset) -> Self {
        Self { preset, ..self }
    }

    /// With that answer to hints.
    #[must_use]
    pub fn hints(self, hints: Hints) -> Self {
        Self { hints, ..self }
    }

    /// With a driver of that version, as the driver writes it: 12020 is CUDA 12.2.
    #[must_use]
    pub fn driver_version(self, version: i32) -> Self {
        Self { driver_version: CudaVersion(version), ..self }
    }

    /// With that granularity for every kind of memory, or one that depends on it.
    #[must_use]
    pub fn granularity(self, granularity: Granularity) -> Self {
        Self { granularity, ..self }
    }

    /// With so much memory on each device.
    #[must_use]
    pub fn device_memory(mut self, bytes: usize) -> Self {
        for device in &mut self.devices {
            device.total_memory = bytes;
        }
        self
    }

    /// With that many bytes of address space for reservations.
    #[must_use]
    pub fn address_window(self, bytes: u64) -> Self {
        Self { address_window: Some(bytes), ..self }
    }

    /// With fresh device memory that reads as `poison`, or as zero for none.
    #[must_use]
    pub fn poison(self, poison: Option<u8>) -> Self {
        Self { poison, ..self }
    }

    /// With these NUMA nodes.
    #[must_use]
    pub fn numa_nodes(self, nodes: impl Into<Vec<NumaNode>>) -> Self {
        Self { numa_nodes: nodes.into(), ..self }
    }

    /// With an IMEX channel.
    #[must_use]
    pub fn with_imex(self) -> Self {
        Self { imex: true, ..self }
    }

    /// With these of its devices alone, numbered anew: what CUDA_VISIBLE_DEVICES does.
    #[must_use]
    pub fn visible(mut self, ordinals: &[usize]) -> Self {
        self.devices = ordinals.iter().filter_map(|&ordinal| self.devices.get(ordinal).cloned()).collect();
        self
    }

    pub(crate) fn device(&self, ordinal: i32) -> Option<&DeviceModel> {
        self.devices.get(usize::try_from(ordinal).ok()?)
    }

    pub(crate) fn ordinal_of(&self, uuid: CUuuid) -> Option<i32> {
        let index = self.devices.iter().position(|device| device.uuid == uuid)?;
        i32::try_from(index).ok()
    }

    /// The memory of a node, if there is that node.
    pub(crate) fn node_memory(&self, id: i32) -> Option<usize> {
        if self.numa_nodes.is_empty() {
            return (id == 0).then_some(usize::MAX);
        }
        self.numa_nodes.iter().find(|node| node.id == id).map(|node| node.memory)
    }

    /// The node that host memory without a node of its own is made at: the first one with memory.
    pub(crate) fn first_node(&self) -> i32 {
        self.numa_nodes.iter().find(|node| node.memory > 0).map_or(0, |node| node.id)
    }

    /// Whether `device` reaches the memory of `owner`.
    pub(crate) fn reaches(&self, device: i32, owner: i32) -> bool {
        device == owner
            || match (self.device(device), self.device(owner)) {
                (Some(device), Some(owner)) => device.peers.contains(&owner.uuid),
                _ => false,
            }
    }

    /// An attribute of a device, if the driver's version has it.
    pub(crate) fn attribute(&self, device: &DeviceModel, attribute: u32) -> Option<i32> {
        let known = attribute >= 1 && self.driver_version.0 >= attribute_since(attribute);
        known.then(|| device.attributes.get(&attribute).copied().unwrap_or(0))
    }
}

/// The first CUDA version whose driver knows an attribute.
fn attribute_since(attribute: u32) -> i32 {
    match attribute {
        0..=101 => 2000,
        102..=106 => 10020,
        107..=111 => 11000,
        112 => 11010,
        113..=119 => 11030,
        120..=124 => 11070,
        128 | 133 => 12030,
        125..=129 => 12000,
        132 => 12010,
        130..=139 => 12020,
        140..=142 => 12090,
        143 => 12080,
        144..=147 => 13000,
        148..=153 => 13030,
        154..=162 => 13040,
        _ => i32::MAX,
    }
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
}
