//! What an unpacked file keeps of what it was, whatever it comes from.

/// Read, write and pass, for the owner.
const OWNER_ALL: u32 = 0o700;
const OWNER_READ: u32 = 0o400;
const SET_ID: u32 = 0o6000;

/// Returns the mode that a file gets, and whether set-id bits were cleared. Its owner may read it, so that it can be copied.
pub(crate) fn file_mode(mode: u32) -> (u32, bool) {
    (mode & 0o1777 | OWNER_READ, mode & SET_ID != 0)
}

/// Returns the mode that a folder gets. Its owner may do everything, so that it can be removed; its set-id bits, which give the
/// group of the folder to what is made in it, go without a word, because groups are not kept either.
pub(crate) fn folder_mode(mode: u32) -> u32 {
    mode & 0o1777 | OWNER_ALL
}

/// Tells whether an extended attribute is kept: those of programs are, but not those by which overlayfs marks its layers.
/// Attributes of other kinds (`security.*`, `trusted.*`, `system.*`) ask for rights, or speak of owners that are not kept.
pub(crate) fn keeps_attribute(name: &[u8]) -> bool {
    name.strip_prefix(b"user.").is_some_and(|rest| !rest.is_empty() && !rest.starts_with(b"overlay."))
}

/// The attribute by which a program has rights of its own.
pub(crate) const CAPABILITY: &[u8] = b"security.capability";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_lose_what_is_dangerous_and_gain_what_removal_needs() {
        assert_eq!(file_mode(0o100_644), (0o644, false));
        assert_eq!(file_mode(0o4755), (0o755, true));
        assert_eq!(file_mode(0o2000), (0o400, true));
        assert_eq!(folder_mode(0o41_777), 0o1777);
        assert_eq!(folder_mode(0o2050), 0o750);
    }

    #[test]
    fn attributes_of_programs_alone_are_kept() {
        assert!(keeps_attribute(b"user.comment"));
        for name in ["user.", "user.overlay.opaque", "trusted.overlay.opaque", "security.capability", "user"] {
            assert!(!keeps_attribute(name.as_bytes()), "{name}");
        }
    }
}
