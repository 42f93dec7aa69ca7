"""Values outside of messages: shared memory, references to it, shared and kept values, pores."""
