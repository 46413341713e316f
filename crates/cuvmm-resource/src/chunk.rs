//! [`Chunk`]: what is told of one piece of a buffer's memory.

use cuvmm_driver::sys::{CUdeviceptr, CUmemAccessDesc, CUmemAllocationHandleType};
use cuvmm_handles::{Mapping, Origin};

use crate::buffer::VirtualMemoryBuffer;

/// One piece of physical memory of a buffer, as it is mapped. It pins nothing.
///
/// ```
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let device = simulator.driver()?.device(0)?;
/// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
/// let buffer = resource.allocate(2 << 20)?.grow_into(6 << 20)?;
/// let sizes: Vec<usize> = buffer.chunks().iter().map(|chunk| chunk.size).collect();
/// assert_eq!(sizes, [2 << 20, 4 << 20]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Chunk {
    /// Where it begins.
    pub address: CUdeviceptr,
    /// How long it is, in bytes.
    pub size: usize,
    /// Whom it was granted to.
    pub access: Vec<CUmemAccessDesc>,
    /// The kinds of handle that it was made for; none where it was not made here.
    pub handle_kinds: CUmemAllocationHandleType,
    /// Whether it was made for network cards to reach it (GPUDirect RDMA); false where it was not made here.
    pub rdma: bool,
    /// Whether it was made compressible; false where it was not made here.
    pub compression: bool,
}

impl VirtualMemoryBuffer {
    /// The physical pieces that it is made of, in address order. A driver query about an address answers for the
    /// one piece around it.
    pub fn chunks(&self) -> Vec<Chunk> {
        let chunk = |mapping: &Mapping| {
            let flags = mapping.allocation().flags().unwrap_or_default();
            Chunk {
                address: mapping.address(),
                size: mapping.size(),
                access: mapping.access().to_vec(),
                handle_kinds: made_for(mapping),
                rdma: flags.gpu_direct_rdma_capable != 0,
                compression: flags.compression_type != 0,
            }
        };
        self.mappings().into_iter().map(chunk).collect()
    }

    /// The kinds of handle that all of it can be exported as: those of its resource that every chunk was made for. So none
    /// where any chunk was imported, or made elsewhere.
    ///
    /// ```
    /// # use cuvmm_driver::sys::CUmemAllocationHandleType;
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let device = Simulator::new(Machine::h200()).driver()?.device(0)?;
    /// let resource = VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::PosixFd))?;
    /// let buffer = resource.allocate(2 << 20)?;
    /// assert_eq!(buffer.export_kinds(), CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR);
    /// # Ok(())
    /// # }
    /// ```
    pub fn export_kinds(&self) -> CUmemAllocationHandleType {
        let ours = self.resource().handle_kind().as_driver();
        let made_for = |mapping: &Mapping| made_for(mapping).0;
        CUmemAllocationHandleType(self.mappings().into_iter().map(made_for).fold(ours.0, |all, kinds| all & kinds))
    }
}

/// The kinds of handle that a chunk was made for, if it was made here.
fn made_for(mapping: &Mapping) -> CUmemAllocationHandleType {
    match mapping.allocation().origin() {
        Origin::Created(kinds) => kinds,
        _ => CUmemAllocationHandleType::NONE,
    }
}
