//! An image of `entries::int8` and nothing else.
#![cfg_attr(target_os = "none", no_std, no_main)]

attn_firmware::image!(attn_firmware::entries::int8);
