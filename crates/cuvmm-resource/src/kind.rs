//! What memory can be asked to be: where it lies, who may touch it, and how it can be shared.

use cuvmm_driver::sys::{CUmemAccess_flags, CUmemAllocationHandleType};

use crate::error::Error;

/// Where memory lies.
///
/// ```
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let device = simulator.driver()?.device(0)?;
/// let options = Options::new().location(Location::HostNuma(0));
/// let resource = VirtualMemoryResource::new(&device, options)?;
/// assert_eq!((resource.device_id(), resource.is_host_accessible()), (None, true));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Location {
    /// The resource's device.
    #[default]
    Device,
    /// The host, wherever the driver finds room. It can't be shared.
    Host,
    /// This NUMA node of the host.
    HostNuma(i32),
    /// The NUMA node that the thread which makes the resource runs on: found out then, once.
    HostNumaCurrent,
}

impl Location {
    /// Whether it is memory of the host.
    pub fn is_host(self) -> bool {
        self != Self::Device
    }
}

/// How memory can be handed to other processes: fixed when it is made.
///
/// ```
/// # use cuvmm_driver::sys::CUmemAllocationHandleType;
/// # use cuvmm_resource::HandleKind;
/// assert_eq!(HandleKind::default(), HandleKind::None);
/// assert_eq!(HandleKind::PosixFd.as_driver(), CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR);
/// assert!(HandleKind::try_from(CUmemAllocationHandleType::WIN32).is_err());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum HandleKind {
    /// Not at all, which costs nothing.
    #[default]
    None,
    /// As POSIX file descriptors.
    PosixFd,
    /// As fabric handles, which other hosts can import too. It takes an IMEX channel.
    Fabric,
    /// As either.
    PosixFdAndFabric,
}

impl HandleKind {
    const ALL: [Self; 4] = [Self::None, Self::PosixFd, Self::Fabric, Self::PosixFdAndFabric];

    /// The driver's own name of it.
    pub fn as_driver(self) -> CUmemAllocationHandleType {
        let (posix, fabric) = (CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR, CUmemAllocationHandleType::FABRIC);
        match self {
            Self::None => CUmemAllocationHandleType::NONE,
            Self::PosixFd => posix,
            Self::Fabric => fabric,
            Self::PosixFdAndFabric => CUmemAllocationHandleType(posix.0 | fabric.0),
        }
    }
}

impl HandleKind {
    pub(crate) fn has_posix_fd(self) -> bool {
        matches!(self, Self::PosixFd | Self::PosixFdAndFabric)
    }

    pub(crate) fn has_fabric(self) -> bool {
        matches!(self, Self::Fabric | Self::PosixFdAndFabric)
    }
}

impl TryFrom<CUmemAllocationHandleType> for HandleKind {
    type Error = Error;

    /// The kind that the driver calls so.
    ///
    /// # Errors
    /// [`Error::UnknownHandleKind`] for those of Windows and any other.
    fn try_from(kinds: CUmemAllocationHandleType) -> Result<Self, Error> {
        let known = Self::ALL.into_iter().find(|kind| kind.as_driver() == kinds);
        known.ok_or(Error::UnknownHandleKind { kinds })
    }
}

/// What a device may do with memory.
///
/// ```
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let driver = Simulator::new(Machine::h200_pair()).driver()?;
/// // Device 1 reads what device 0 writes.
/// let options = Options::new().peer(&driver.device(1)?, Access::Read);
/// let buffer = VirtualMemoryResource::new(&driver.device(0)?, options)?.allocate(2 << 20)?;
/// assert_eq!(buffer.chunks()[0].access.len(), 2);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Access {
    /// Nothing.
    None,
    /// Read it.
    Read,
    /// Read and write it.
    #[default]
    ReadWrite,
}

impl Access {
    /// The driver's own name of it.
    pub fn as_driver(self) -> CUmemAccess_flags {
        match self {
            Self::None => CUmemAccess_flags::NONE,
            Self::Read => CUmemAccess_flags::READ,
            Self::ReadWrite => CUmemAccess_flags::READWRITE,
        }
    }
}

/// Which of the driver's two granularities sizes are rounded up to.
///
/// ```
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Simulator::new(Machine::odd()).driver()?.device(0)?;
/// let size = |kind| -> Result<_, Error> {
///     let resource = VirtualMemoryResource::new(&device, Options::new().granularity(kind))?;
///     Ok(resource.allocate(1)?.size())
/// };
/// assert_eq!((size(GranularityKind::Minimum)?, size(GranularityKind::Recommended)?), (1 << 20, 2 << 20));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum GranularityKind {
    /// The least that works.
    #[default]
    Minimum,
    /// What the driver says performs best.
    Recommended,
}

/// How much a property of memory is wanted that not every device can give it.
///
/// ```
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Simulator::new(Machine::odd()).driver()?.device(0)?;
/// let resource = VirtualMemoryResource::new(&device, Options::new().rdma(Request::IfSupported))?;
/// assert!(!resource.has_rdma(), "this device has none");
/// assert!(VirtualMemoryResource::new(&device, Options::new().rdma(Request::Required)).is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Request {
    /// Not wanted.
    #[default]
    Off,
    /// Wanted where it can be had. Whether it was had is told. Where there is no memory to try it out, there is no
    /// resource.
    IfSupported,
    /// Wanted, or no resource.
    Required,
}
