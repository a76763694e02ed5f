//! The kernel's links, addresses, routes and neighbours, over rtnetlink. Its types stay in here.

pub mod inventory;
