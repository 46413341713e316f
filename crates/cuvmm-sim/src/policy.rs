//! Every choice between the presets, one field each.

use crate::machine::Hints;

/// Whose answers a simulated driver gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Preset {
    /// The documented rules, also where a measured driver is lax or crashes. Where both refuse, the measured code.
    #[default]
    Strict,
    /// What a measured driver (580.159.04, CUDA 13.0) answers. Where that crashes: a violation, and 1.
    Measured,
}

/// The choices. "Lax" says that a call succeeds which the documentation gives no right to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Policy {
    /// A map may run past the end of the reservation that it begins in.
    pub(crate) map_leaves_reservation: bool,
    /// A handle whose last reference was given back maps, is exported and tells its properties as long as a mapping
    /// keeps the memory.
    pub(crate) released_handle_lives: bool,
    /// A handle tells its properties although nothing is left of its memory.
    pub(crate) gone_handle_tells: bool,
    /// An unmap need not be of mappings alone: of its addresses the first must be somebody's, and it may wrap around,
    /// which unmaps nothing.
    pub(crate) unmap_over_holes: bool,
    /// An unmap may cover mappings of several reservations.
    pub(crate) unmap_across_reservations: bool,
    /// One grant may cover mappings of several reservations.
    pub(crate) access_across_reservations: bool,
    /// A grant with a hole inside is given to what is mapped before the hole, and succeeds.
    pub(crate) grant_up_to_a_hole: bool,
    /// The access of HOST is also what the first device was granted.
    pub(crate) host_access_is_the_first_devices: bool,
    /// The range around an address of host memory has no base.
    pub(crate) host_range_has_no_base: bool,
    /// Handle types that nobody defined are ignored at create.
    pub(crate) unknown_handle_types: bool,
    /// Usages that nobody defined are ignored at create.
    pub(crate) unknown_usages: bool,
    /// Memory of a device that is hidden from this process is imported.
    pub(crate) hidden_memory_imports: bool,
    /// What becomes of hints where the machine leaves it to the preset.
    pub(crate) hints: Hints,
    /// Memory made at HOST says that it is at HOST_NUMA 0.
    pub(crate) host_reads_as_numa: bool,
    /// A thread's capture mode is exchanged for one that is none.
    pub(crate) unknown_capture_modes: bool,
    /// A capture ends with nowhere to write its graph, which nobody can destroy then.
    pub(crate) capture_ends_unseen: bool,
    /// A graph gives back references to a user object that it does not have, at the caller's cost.
    pub(crate) graph_releases_what_it_lacks: bool,
    /// A context that is gone is made current; only its use is refused.
    pub(crate) gone_contexts_made_current: bool,
}

impl Preset {
    pub(crate) fn policy(self) -> Policy {
        let lax = self == Self::Measured;
        Policy {
            map_leaves_reservation: lax,
            released_handle_lives: lax,
            gone_handle_tells: lax,
            unmap_over_holes: lax,
            unmap_across_reservations: lax,
            access_across_reservations: lax,
            grant_up_to_a_hole: lax,
            host_access_is_the_first_devices: lax,
            host_range_has_no_base: lax,
            unknown_handle_types: lax,
            unknown_usages: lax,
            hidden_memory_imports: lax,
            hints: if lax { Hints::Arenas } else { Hints::Granted },
            host_reads_as_numa: lax,
            unknown_capture_modes: lax,
            capture_ends_unseen: lax,
            graph_releases_what_it_lacks: lax,
            gone_contexts_made_current: lax,
        }
    }
}
