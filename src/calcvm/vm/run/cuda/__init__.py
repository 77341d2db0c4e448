"""The VM on a GPU: programs as PTX, the driver that runs them, and a stand-in for it."""
